"""A missing package is named, with what brings it; nothing is imported before it is asked for."""

import subprocess
import sys

MISSING = {
    "transformers": ("transformers", 'pip install "steadygrad[transformers]"'),
    "lightning": ("lightning", 'pip install "steadygrad[lightning]"'),
    "olmo_core": ("ai2-olmo-core", "pip install ai2-olmo-core"),
    "torchtitan": ("torchtitan", "pip install torchtitan"),
}

SCRIPT = """
import importlib, sys
import steadygrad.integrations.metrics, steadygrad.integrations.windows
assert not {"transformers", "lightning", "accelerate", "torchtitan"} & set(sys.modules)
for module in sys.argv[1:]:
    sys.modules[module] = None
    try:
        importlib.import_module(f"steadygrad.integrations.{module}")
    except Exception as error:
        print(error)
    del sys.modules[module]
"""


def test_a_missing_package_is_named():
    """All in one process: to load torch takes longer than the rest."""
    command = [sys.executable, "-c", SCRIPT, *MISSING]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        f"Expected the package {package!r}. Found none. Remedy: {remedy}."
        for package, remedy in MISSING.values()
    ]
