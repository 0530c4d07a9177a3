"""A missing package is named, with what brings it; nothing is imported before it is asked for."""

import subprocess
import sys

import pytest

MISSING = {
    "transformers": ("transformers", 'pip install "steadygrad[transformers]"'),
    "lightning": ("lightning", 'pip install "steadygrad[lightning]"'),
    "olmo_core": ("ai2-olmo-core", "pip install ai2-olmo-core"),
    "torchtitan": ("torchtitan", "pip install torchtitan"),
}

SCRIPT = """
import sys
sys.modules[{module!r}] = None
import steadygrad.integrations.{module}
"""


@pytest.mark.parametrize("module", MISSING)
def test_a_missing_package_is_named(module):
    package, remedy = MISSING[module]
    script = SCRIPT.format(module=module)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.endswith(f"Expected the package {package!r}. Found none. Remedy: {remedy}.")


def test_the_package_itself_needs_none():
    script = (
        "import sys, steadygrad.integrations, steadygrad.integrations.sinks\n"
        "found = {'transformers', 'lightning', 'accelerate', 'torchtitan'} & set(sys.modules)\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
