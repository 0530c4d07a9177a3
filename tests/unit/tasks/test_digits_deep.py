"""One loss scale cannot train digits-deep in float16 and layer-wise scales can, with room."""

import json
import math
import os
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch

from steadygrad.studies.folder import read_run
from steadygrad.tasks import load_task
from steadygrad.tasks.digits import digit_losses

ROOT = Path(__file__).parents[3]
STARVED = {"embed", *(f"blocks.{i}" for i in range(6)), "pool", "digit"}
# The loss of guessing is ln 10 = 2.30.
UNTRAINED, TRAINED = 2.2, 1.7
# Alone, the digits train at 2**-6, and do not at 2**-8.
TOO_SMALL = 2.0**-16


def check_verdict(summary):
    """All layers but the area's head underflow, and that one is limiting."""
    diagnosis, proposal = summary["diagnosis"], summary["proposal"]
    assert {*diagnosis["underflowing"]} == STARVED
    assert min(diagnosis["underflowing"].values()) > 0.9
    assert {*diagnosis["limiting"]} == {"area"}
    for name in ("regressed", "nonfinite_at_any_scale", "internal_underflow", "forward"):
        assert diagnosis[name] == {}, name
    assert {*proposal["layer_scales"]} == STARVED
    assert min(proposal["layer_scales"].values()) >= 2.0**30
    before, after = summary["phases"]["before"], summary["phases"]["after"]
    assert before["loss_scale"] <= TOO_SMALL
    assert after["skipped"] <= 5
    assert before["valid_loss"] > UNTRAINED
    assert after["valid_loss"] < TRAINED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "threads", "kernels"),
    # Without vectors it takes three times as long.
    [*product(range(3), [1, 2], ["avx2", "avx512"]), (0, 1, "default")],
)
def test_the_verdict_is_the_same_everywhere(seed, threads, kernels):
    """48 steps of each training; whichever instruction sets the processor lacks are left out."""
    here = torch.backends.cpu.get_cpu_capability()
    known = ("DEFAULT", "AVX2", "AVX512")
    if here not in known or kernels.upper() not in known[: known.index(here) + 1]:
        pytest.skip(f"needs {kernels} kernels")
    more = {"OMP_NUM_THREADS": str(threads), "ATEN_CPU_CAPABILITY": kernels}
    more["OMP_WAIT_POLICY"] = "passive"  # two threads that spin are slow beside other work
    command = [sys.executable, "-m", "tests.unit.tasks.deep_runs", str(seed), "48"]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | more, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    assert found["kernels"] == [kernels.upper(), threads]
    check_verdict(found["inspect"])
    one, auto = found["one"], found["auto"]
    assert one["loss"] > UNTRAINED
    assert one["scale"] <= TOO_SMALL
    assert auto["loss"] < TRAINED
    # Eight binades below float16's largest number.
    assert max(one["forward"], auto["forward"]) < 2.0**8


def test_the_report_in_the_documentation_has_this_verdict():
    """The test above says that a fresh run has it too, and the task's first words that it is it."""
    run = read_run(ROOT / "docs" / "records" / "inspect")
    task = load_task("digits-deep")
    model = task.make_model()
    said = run.header.task
    assert said.parameters == sum(p.numel() for p in model.parameters())
    assert (said.batch_size, said.lr) == (task.batch_size, task.lr)
    assert said.provenance == task.provenance
    assert {*run.header.plan.layers} == {*STARVED, "area"}
    check_verdict(run.summary)
    # What the page of `inspect` says of it.
    words = (ROOT / "docs" / "inspect.md").read_text()
    phases = run.summary["phases"]
    before, after = phases["before"], phases["after"]
    assert f"$2^{{{math.log2(before['loss_scale']):.0f}}}$" in words
    for value in (before["valid_loss"], after["valid_loss"]):
        assert f"{value:.2f}" in words


def test_the_areas_do_not_shape_the_features():
    task = load_task("digits-deep")
    torch.manual_seed(0)
    model = task.make_model()
    batch = task.train.batch(torch.arange(8))
    task.per_sample_loss(model, batch).mean().backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    digit_losses(model, batch).mean().backward()
    for name, parameter in model.named_parameters():
        if name.startswith("area"):
            assert parameter.grad is None
            assert found[name].abs().max() > 1e8
        else:
            assert torch.equal(parameter.grad, found[name])
            assert parameter.grad.abs().max() < 1
