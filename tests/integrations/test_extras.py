"""A missing package is named, with what brings it; nothing is imported before it is asked for."""

import os
import subprocess
import sys

import pytest

from tests.integrations.pages import ROOT

MISSING = {
    "transformers": ("transformers", 'pip install "steadygrad[transformers]"'),
    "lightning": ("lightning", 'pip install "steadygrad[lightning]"'),
    "olmo_core": ("ai2-olmo-core", "pip install ai2-olmo-core"),
    "torchtitan": ("torchtitan", "pip install torchtitan"),
}

SCRIPT = """
import importlib, sys
for module in sys.argv[1:]:
    sys.modules[module] = None
    try:
        importlib.import_module(f"steadygrad.integrations.{module}")
    except Exception as error:
        print(error)
    del sys.modules[module]
"""


@pytest.mark.slow
def test_a_missing_package_is_named():
    """All in one process: to load torch takes longer than the rest."""
    command = [sys.executable, "-c", SCRIPT, *MISSING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"Expected the package {package!r}. Found none. Remedy: {remedy}."
        for package, remedy in MISSING.values()
    ]


def test_the_package_itself_needs_none():
    script = (
        "import sys, steadygrad.integrations.metrics, steadygrad.integrations.windows\n"
        "found = {'transformers', 'lightning', 'accelerate', 'torchtitan'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("everything", [False, True])
def test_a_broken_trainer_fails_where_all_are_installed(everything, tmp_path):
    """A module that cannot be collected, and a test that skips itself."""
    (tmp_path / "lightning").mkdir()
    (tmp_path / "lightning" / "__init__.py").write_text("raise ModuleNotFoundError('broken')\n")
    paths = [str(tmp_path), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    environment["STEADYGRAD_ALL_TRAINERS"] = "1" if everything else ""
    command = [
        sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist",
        "--continue-on-collection-errors", "tests/integrations/test_lightning.py",
        "tests/integrations/test_loggers.py", "-k", "lightning",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert ("error" in done.stdout) is everything
    assert ("failed" in done.stdout) is everything
    assert ("skipped" in done.stdout) is not everything
    assert (done.returncode != 0) is everything
