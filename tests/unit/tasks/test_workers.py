"""Batches in order: the same from worker processes as from this one."""

import multiprocessing
import os
import signal
import time

import numpy
import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.tasks import TaskError, TensorSamples, batches

# Python 3.12 warns of any fork beside threads; torch's loader forks where Python does.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

CPU = torch.device("cpu")
ROWS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
ORDER = [torch.tensor(numbers) for numbers in ([3, 1], [2], [19, 0, 7], [5, 5], [11])]


class Made:
    """Samples whose batches a function makes of the sample numbers."""

    def __init__(self, make):
        self.batch = make

    def __len__(self):
        return 20


def says_its_process(indices):
    return indices.numpy(), 0.5, os.getpid()


def breaks(indices):
    if 7 in indices:
        raise KeyError("seven\nand more")
    return indices


def dies(indices):
    """Its worker is killed, as when memory runs out."""
    if 7 in indices:
        os.kill(os.getpid(), signal.SIGKILL)
    return indices


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_same_and_in_order(workers):
    samples = TensorSamples({"x": ROWS, "n": torch.arange(20)})
    torch.manual_seed(0)
    before = torch.get_rng_state()
    found = list(batches(samples, iter(ORDER), CPU, workers))
    assert [batch["n"].tolist() for batch in found] == [numbers.tolist() for numbers in ORDER]
    assert all(
        torch.equal(batch["x"], ROWS[numbers]) for batch, numbers in zip(found, ORDER, strict=True)
    )
    assert [type(batch) for batch in found] == [dict] * 5
    # Training draws the same numbers with workers as without.
    assert torch.equal(torch.get_rng_state(), before)
    # Torch's handler of a killed worker would raise wherever the program is at the time.
    handler = signal.getsignal(signal.SIGCHLD)
    assert not str(getattr(handler, "__module__", "")).startswith("torch.")


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_the_work_and_convert_nothing(workers):
    found = list(batches(Made(says_its_process), ORDER, CPU, workers))
    assert [(type(array), number) for array, number, _ in found] == [(numpy.ndarray, 0.5)] * 5
    assert found[0][0].tolist() == [3, 1]
    processes = {process for *_, process in found}
    assert len(processes) == max(workers, 1)
    assert (os.getpid() in processes) == (workers == 0)


def test_batches_are_made_as_they_are_asked_for():
    """No end is needed: an order may be endless."""

    def endless():
        while True:
            yield from ORDER

    for workers in (0, 1):
        made = batches(TensorSamples(ROWS), endless(), CPU, workers)
        assert [len(next(made)) for _ in range(6)] == [2, 1, 3, 2, 1, 2]
        made.close()


def test_an_error_in_a_worker_is_one_line():
    made = batches(Made(breaks), ORDER, CPU, 2)
    assert [next(made).tolist(), next(made).tolist()] == [[3, 1], [2]]
    with pytest.raises(TaskError, match=r"loader_workers.*KeyError") as caught:
        next(made)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_samples_that_cannot_be_sent_are_refused():
    """Where processes start afresh, as on macOS and Windows."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with pytest.raises(TaskError, match="loader_workers"):
            next(batches(Made(lambda indices: indices), ORDER, CPU, 1))
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_workers_are_checked():
    with pytest.raises(InputError, match="`workers`"):
        next(batches(TensorSamples(ROWS), ORDER, CPU, -1))


@pytest.mark.slow  # torch looks after its workers every five seconds
def test_a_killed_worker_is_one_line_where_the_next_batch_is_asked_for():
    # A loader of the task's own has left torch's handler of signals.
    list(torch.utils.data.DataLoader(ROWS, num_workers=1))
    made = batches(Made(dies), ORDER, CPU, 1)
    next(made)
    time.sleep(1)
    with pytest.raises(TaskError, match="loader_workers") as caught:
        list(made)
    assert "\n" not in str(caught.value)
