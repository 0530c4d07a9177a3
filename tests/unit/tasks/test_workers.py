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


class Processes:
    """Samples that say which process made them."""

    def __len__(self):
        return 20

    def batch(self, indices):
        return indices, os.getpid()


class Broken(Processes):
    def batch(self, indices):
        if 7 in indices:
            raise KeyError("seven\nand more")
        return indices


class Unpicklable(Processes):
    def __reduce__(self):
        raise TypeError("cannot pickle 'generator' object")


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_same_and_in_order(workers):
    samples = TensorSamples({"x": ROWS, "n": torch.arange(20)})
    found = list(batches(samples, iter(ORDER), CPU, workers))
    assert [batch["n"].tolist() for batch in found] == [numbers.tolist() for numbers in ORDER]
    assert all(
        torch.equal(batch["x"], ROWS[numbers]) for batch, numbers in zip(found, ORDER, strict=True)
    )
    assert [type(batch) for batch in found] == [dict] * 5


class Arrays(Processes):
    def batch(self, indices):
        return indices.numpy(), 0.5


def test_workers_convert_nothing():
    for workers in (0, 1):
        ((array, number),) = batches(Arrays(), ORDER[:1], CPU, workers)
        assert (type(array), array.tolist(), number) == (numpy.ndarray, [3, 1], 0.5)


def test_workers_do_the_work():
    processes = {
        worker: {pid for _, pid in batches(Processes(), ORDER, CPU, worker)} for worker in (0, 2)
    }
    assert processes[0] == {os.getpid()}
    assert len(processes[2]) == 2
    assert os.getpid() not in processes[2]


def test_workers_draw_nothing_from_torchs_generator():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    list(batches(TensorSamples(ROWS), ORDER, CPU, 1))
    assert torch.equal(torch.get_rng_state(), before)


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
    made = batches(Broken(), ORDER, CPU, 2)
    assert [next(made).tolist(), next(made).tolist()] == [[3, 1], [2]]
    with pytest.raises(TaskError, match=r"loader_workers.*Found KeyError.*Remedy") as caught:
        next(made)
    assert "\n" not in str(caught.value)


@pytest.mark.filterwarnings("ignore:Got pickle error:UserWarning")
def test_samples_that_cannot_be_sent_are_refused():
    """Where processes start afresh, as on macOS and Windows."""
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        with pytest.raises(TaskError, match=r"cannot pickle.*Remedy: loader_workers = 0"):
            next(batches(Unpicklable(), ORDER, CPU, 1))
    finally:
        multiprocessing.set_start_method(before, force=True)


def test_workers_are_checked():
    with pytest.raises(InputError, match=r"`workers`.*Remedy"):
        next(batches(TensorSamples(ROWS), ORDER, CPU, -1))


class Dying(Processes):
    """Its worker is killed, as when memory runs out."""

    def batch(self, indices):
        if 7 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return indices


@pytest.mark.slow  # torch looks after its workers every five seconds
def test_a_killed_worker_is_one_line_where_the_next_batch_is_asked_for():
    # A loader of the task's own has left torch's handler of signals.
    list(torch.utils.data.DataLoader(ROWS, num_workers=1))
    made = batches(Dying(), ORDER, CPU, 1)
    next(made)
    time.sleep(1)
    with pytest.raises(TaskError, match=r"loader_workers.*Remedy") as caught:
        list(made)
    assert "\n" not in str(caught.value)


def test_no_handler_of_a_killed_worker_stays():
    """It would raise wherever the program is at the time, between two halves of a line as well."""
    list(batches(TensorSamples(ROWS), ORDER, CPU, 1))
    handler = signal.getsignal(signal.SIGCHLD)
    assert not str(getattr(handler, "__module__", "")).startswith("torch.")
