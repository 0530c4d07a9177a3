"""Faults in a training in one process: the step, the stage and the module are found."""

import pytest
import torch

from steadygrad.trace.diff import compare
from steadygrad.trace.runs import read_run
from steadygrad.trace.words import summary
from tests.unit.trace.faults import FAULTS, SINGLE, run, setting

NAMES = [name for name, wrong in FAULTS.items() if SINGLE[0] in wrong.kinds]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """Runs without a fault, which many faults share."""
    folder, found = tmp_path_factory.mktemp("right"), {}

    def get(wrong):
        if (key := setting(wrong)) not in found:
            path = folder / str(len(found))
            run(path, wrong, wrong.right)
            found[key] = read_run(path)
        return found[key]

    return get


def test_table():
    assert len(FAULTS) >= 30
    assert all(wrong.thread for wrong in FAULTS.values())


@pytest.mark.parametrize("name", NAMES)
def test_fault(name, right, tmp_path):
    wrong = FAULTS[name]
    run(tmp_path, wrong, steps=wrong.truth[0] + 1)
    said = summary(compare(right(wrong), read_run(tmp_path)))
    expected = ["unknown" if wrong.unknown else "part", *wrong.truth]
    assert [said[k] for k in ("verdict", "step", "stage", "module")] == expected, said["answer"]


@pytest.mark.parametrize(
    "name", ["a seed is not restored", "a layer in eval mode", "a loss over padding"]
)
def test_no_fault(name, right, tmp_path):
    wrong = FAULTS[name]
    run(tmp_path, wrong, wrong.right)
    assert compare(right(wrong), read_run(tmp_path)).verdict == "same"
