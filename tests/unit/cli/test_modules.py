"""Modules that the program loads: few for a help text, and no other study's for a study."""

import json
import subprocess
import sys

import pytest

from steadygrad._studies import STUDIES
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import ROOT, tiny
from tests.unit.report.conftest import made_run
from tests.unit.studies.results import write

EXTRAS = {"torch", "numpy", "scipy", "matplotlib", "rich", "msgspec", "sklearn"}
SCRIPT = """
import json, sys
from steadygrad.cli import main
code = main(sys.argv[1:])
print("\\n" + json.dumps([code, sorted(sys.modules)]))
"""


def loaded(*arguments):
    """The modules of the library, and the extras, that a command loads."""
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    code, modules = json.loads(done.stdout.splitlines()[-1])
    assert code in (0, 4), done.stderr  # one pair of `ab` cannot tell
    ours = {name for name in modules if name.split(".")[0] == "steadygrad"}
    return ours, EXTRAS.intersection(modules)


@pytest.mark.parametrize(
    ("words", "needed", "most"),
    [
        ("--help", set(), 7),
        ("--version", set(), 7),
        *((f"{name} --help", set(), 7) for name in ("tasks", "init", "doctor")),
        # Its settings alone.
        *((f"{name} --help", {"msgspec"}, 20) for name in STUDIES),
    ],
)
def test_a_help_text_needs_little(words, needed, most):
    ours, extras = loaded(*words.split())
    assert extras == needed
    assert len(ours) <= most


def test_a_page_with_a_schedule_needs_no_torch(tmp_path):
    run = made_run()
    assert run.summary["schedule"]["advised"]
    write(tmp_path / "run", *run.results, header=run.header, summary=run.summary)
    ours, extras = loaded("report", str(tmp_path / "run"))
    assert extras <= {"msgspec", "matplotlib", "numpy", "scipy"}
    assert not any(f".{other}" in name for name in ours for other in ("compare", "inspect"))


# `advise` measures the noise scale, with 20 modules of its own; `compare` has six optimizers, and
# `inspect` the gradient watch, with 8.
MOST = {"inspect": 104, "advise": 122, "compare": 118, "ab": 55}


@pytest.mark.slow
@pytest.mark.parametrize("study", MOST)
def test_a_study_loads_few_modules_and_none_of_another(study, tmp_path):
    # A budget that a slow machine keeps as well; the lengths say how much is trained.
    short = ["--samples", "256", "--seeds", "3", "--budget", "10m"]
    fast = {"inspect": ["--steps", "16"], "ab": ["--pairs", "1"]}.get(study, short)
    arguments = [tiny(), *fast, *PLAIN, "--out", str(tmp_path / "run")]
    ours, extras = loaded(study, *arguments)
    others = {name for name in MOST if name != study}
    assert not any(f".{other}" in name for name in ours for other in others)
    assert len(ours) <= MOST[study], sorted(ours)
    # Student's quantiles; it takes half a second to load.
    assert ("scipy" in extras) == (study != "inspect")
