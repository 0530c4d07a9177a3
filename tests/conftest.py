"""Settings that torch and Triton read as they are imported, and which cases `make test` takes.

Any test file may import them, so these settings are made here.
"""

import gc
import os
from importlib.util import find_spec
from itertools import groupby
from zlib import crc32

import pytest

# Before torch reads it. The processes share the cores: threads that wait in a loop for others of
# their team take the time of the other processes' tests.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NUMBA = find_spec("numba") is not None

# Tests of the compiled loops themselves. Without Numba `fused=True` warns on a CPU and takes
# multi-tensor calls, which all other tests then hold to the same numbers.
COMPILED_FILES = (
    *(f"unit/optim/test_loop_{name}.py" for name in ("numbers", "processes")),
    *(f"unit/benchmarks/test_{name}.py" for name in ("truth", "compiled")),
)
COMPILED_TESTS = (
    "test_bad_inputs.py::test_freed_memory_is_no_zero_to_kernels",
    "test_fused.py::test_what_loops_cannot_take_goes_by_calls",
    "test_modes.py::test_no_mode_needs_more_than_two_temporaries",
)
collect_ignore = [] if NUMBA else [*COMPILED_FILES]


def pytest_configure(config):
    if not NUMBA:
        config.addinivalue_line("filterwarnings", "ignore:Expected a fused kernel for")


def pytest_collection():
    """Runs where tests are collected: the process that only distributes them needs no torch."""
    # A million objects stay until the end: modules, cases and their parameters. The garbage
    # collector would look through them again and again, here and in each test.
    gc.disable()
    import torch

    # Without a CUDA device Triton's kernels are tried by its interpreter.
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session", autouse=True)
def state_home(tmp_path_factory):
    """A folder in place of the home's, where studies remember which runs are this user's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Exempts all objects made so far from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items):
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        if (few := cases[0].get_closest_marker("few")) and not cases[0].get_closest_marker("slow"):
            for item in {*cases} - spread(cases, *few.args):
                item.add_marker(pytest.mark.slow)
    skipped = pytest.mark.skip(reason="compiled loops, which need numba")
    for item in items if not NUMBA else ():
        if any(name in item.nodeid for name in COMPILED_TESTS):
            item.add_marker(skipped)


def spread(cases, count):
    """Cases with as many values of parameters as so few can have; alike in all processes."""
    values = {item: values_of(item) for item in cases}
    left, kept, seen = sorted(cases, key=lambda item: crc32(item.nodeid.encode())), set(), set()
    for _ in range(min(count, len(cases))):
        best = max(left, key=lambda item: len(values[item] - seen))
        left.remove(best)
        kept.add(best)
        seen |= values[best]
    return kept


def values_of(item):
    """The parameters of a case, as something that can be in a set."""
    return {(name, repr(value)) for name, value in item.callspec.params.items()}
