"""Every example runs as it stands, from its own folder, and prints what it promises.

`make docs` runs the tutorials, which are pages, and fails with them.
"""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"

EXPECTED = {
    "advise.py": "status: complete",
    "ab_script.py": "val_loss=0.",
    "ab_loop.py": "kept: --lr 0.01",
    "noise_scale_in_a_loop.py": "noise scale",
    "split_batch.py": "noise scale",
    "my_task.py": "",
    "my_loader_task.py": "",
    "my_hf_task.py": "",
    "continue_run.py": "status: complete",
    "long_run.py": "predicted for: 1000000",
    "my_lora_task.py": "290 of 1443 weights are trained",
    "policy_gradient.py": "A mean of means",
    "compute_copy.py": "gradients 2.00, masters 4.00, moments 2.04",
    "cpu_offload.py": "states on cpu",
    "reshard.py": "loaded on 3 processes: |momentum| 0.522710",
    "my_optimizer.py": "steps of Lion",
    "adan.py": "as the literal loop",
    "adan_loops.py": "",
    "slurm_executor.py": "[0, 1, 2, 3] from jobs",
    "scaled_adam.py": "clipping threshold",
    "lans.py": "trust ratio",
    "two_runs.py": "exp_avg of 0.weight, before the step, is missing in B",
    "gradient_watch.py": "the backward pass of '2' made a gradient that is not finite",
}


# Those for trainers have tests of their own, in `tests/integrations`.
TRAINERS = {
    "accelerate_loop.py",
    "continue_hf_checkpoint.py",
    "hf_trainer.py",
    "lightning_trainer.py",
}


def test_every_example_is_listed():
    found = {path.name for path in EXAMPLES.glob("*.py")}
    assert found == set(EXPECTED) | TRAINERS


# Packages that are not among those of the tests.
NEEDED = {"my_hf_task.py": "transformers", "slurm_executor.py": "submitit"}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_runs(name):
    if name in NEEDED and find_spec(NEEDED[name]) is None:
        pytest.skip(f"{NEEDED[name]} is of another dependency group, which `make test` leaves out")
    command = [sys.executable, "-W", "error", name]
    done = subprocess.run(command, cwd=EXAMPLES, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert EXPECTED[name] in done.stdout


def test_the_first_program_of_the_readme_prints_what_it_says(capsys):
    text = (EXAMPLES.parent / "README.md").read_text()
    code, said = re.search(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.S).groups()
    exec(code, {})
    found, numbers = capsys.readouterr().out, r"\d+\.\d"
    assert re.sub(numbers, "", found) == re.sub(numbers, "", said)
    # Another processor's roundings move the last digit.
    for a, b in zip(re.findall(numbers, found), re.findall(numbers, said), strict=True):
        assert float(a) == pytest.approx(float(b), abs=0.11)
