"""Samples of tensors and of data loaders, batches of them in order, and the way to the model."""

import os
import signal
from collections import UserDict
from dataclasses import fields
from itertools import cycle, repeat

import numpy
import pytest
import torch
from torch import nn
from torch.utils import data
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from steadygrad._checks import InputError
from steadygrad.tasks import Task, TaskError, TensorSamples, batches, to_device

# Python 3.12 warns of any fork beside threads; torch's loader forks where Python does.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

CPU = torch.device("cpu")
ROWS = torch.arange(40.0).view(20, 2)
LABELS = torch.arange(20)


@pytest.mark.parametrize(
    "rows", [(ROWS, LABELS[:5]), (), 3, {"x": [1.0, 2.0]}, torch.tensor(1.0)], ids=type
)
def test_data_that_are_not_rows_are_refused(rows):
    with pytest.raises(InputError, match="`data`"):
        TensorSamples(rows)


# To the model


class Encoding(UserDict):
    """As ``transformers.BatchEncoding``: a mapping that moves itself and is returned."""

    def to(self, device):
        self.data = {key: value.to(device) for key, value in self.data.items()}
        return self


def test_to_device_follows_the_models_device():
    model = nn.Linear(2, 1, device="meta")
    batch = Encoding(input_ids=LABELS)
    moved, plain, text = to_device((batch, UserDict(x=ROWS), "text"), model)
    assert moved is batch
    assert moved["input_ids"].device.type == plain["x"].device.type == "meta"
    assert text == "text"


# In order, by workers

ORDER = [torch.tensor(numbers) for numbers in ([3, 1], [2], [19, 0, 7], [5, 5], [11])]


class MadeBy:
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


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_are_the_same_and_in_order(workers):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    samples = TensorSamples({"x": ROWS, "n": LABELS})
    found = list(batches(samples, iter(ORDER), CPU, workers))
    assert [batch["n"].tolist() for batch in found] == [numbers.tolist() for numbers in ORDER]
    assert torch.equal(torch.cat([batch["x"] for batch in found]), ROWS[torch.cat(ORDER)])
    assert [type(batch) for batch in found] == [dict] * 5
    # Training draws the same numbers with workers as without.
    assert torch.equal(torch.get_rng_state(), before)
    # Torch's handler of a killed worker would raise wherever the program is at the time.
    handler = signal.getsignal(signal.SIGCHLD)
    assert not str(getattr(handler, "__module__", "")).startswith("torch.")


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_do_the_work_and_convert_nothing(workers):
    found = list(batches(MadeBy(says_its_process), ORDER, CPU, workers))
    assert [(type(array), number) for array, number, _ in found] == [(numpy.ndarray, 0.5)] * 5
    processes = {process for *_, process in found}
    assert len(processes) == max(workers, 1)
    assert (os.getpid() in processes) == (workers == 0)


@pytest.mark.slow
def test_an_error_in_a_worker_is_one_line():
    made = batches(MadeBy(breaks), ORDER, CPU, 1)
    assert [next(made).tolist(), next(made).tolist()] == [[3, 1], [2]]
    with pytest.raises(TaskError, match=r"loader_workers.*KeyError") as caught:
        next(made)
    assert "\n" not in str(caught.value)


# Of data loaders

DATA = TensorDataset(ROWS, LABELS)


def made(loader, **options):
    defaults = {
        "valid": TensorSamples((ROWS, LABELS)),
        "per_sample_loss": lambda model, batch: model(batch[0]).square().mean(1),
        "lr": 0.1,
        "make_model": lambda: nn.Linear(2, 2),
    }
    return Task.from_dataloader(loader, **{**defaults, **options})


def numbers(samples):
    """The second column, which numbers the rows of DATA."""
    return samples.batch(torch.arange(len(samples)))[1].tolist()


# Of different lengths: row i has the numbers 0 to i.
WORDS = [torch.arange(i + 1.0) for i in range(6)]


class AtOnce(list):
    """Gives many rows at once."""

    def __getitems__(self, keys):
        return [self[i] + 100 for i in keys]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(ROWS, range(20), strict=True)


def pad(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def test_a_map_style_data_set_is_collated_in_any_order_and_size():
    task = made(DataLoader(WORDS, batch_size=2, collate_fn=pad), valid=DataLoader(WORDS[:3]))
    assert (len(task.train), len(task.valid)) == (6, 3)
    found = task.train.batch(torch.tensor([2, 0, 1])).tolist()
    assert found == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]
    task = made(DataLoader(AtOnce(WORDS), batch_size=2, collate_fn=pad))
    assert task.train.batch(torch.tensor([1, 0])).tolist() == [[100, 101], [100, -1]]


def test_fields_of_the_loader_and_of_the_caller():
    loader = DataLoader(DATA, batch_size=4, num_workers=2)
    task = made(loader)
    assert (task.name, task.sample) == ("my-model", "sample")
    assert (task.batch_size, task.loader_workers) == (4, 2)
    assert task.make_optimizer is torch.optim.AdamW
    changes = {"name": "mine", "batch_size": 3, "loader_workers": 0, "lr_rule": "linear"}
    task = made(loader, **changes)
    assert {f.name: getattr(task, f.name) for f in fields(task) if f.name in changes} == changes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True, "batch_size": 5, "drop_last": True}, range(20)),
        ({"sampler": data.DistributedSampler(DATA, num_replicas=2, rank=1)}, range(20)),
        ({"sampler": data.RandomSampler(DATA, replacement=True), "batch_size": 2}, range(20)),
        ({"sampler": data.SubsetRandomSampler([7, 1, 4])}, [1, 4, 7]),
        ({"sampler": data.WeightedRandomSampler([0.0] * 3 + [1.0] + [0.0] * 16, 5)}, [3] * 5),
        ({"batch_sampler": [[2, 0], [11]]}, [0, 2, 11]),
        ({"batch_sampler": data.BatchSampler(data.SequentialSampler(range(4)), 3, True)}, range(4)),
        ({"dataset": Subset(DATA, [5, 2, 8])}, [2, 5, 8]),
        # As many as there are rows.
        ({"sampler": cycle(range(3)), "batch_size": 2}, [0] * 7 + [1] * 7 + [2] * 6),
    ],
)
def test_the_sampler_says_which_samples_there_are(options, expected):
    task = made(DataLoader(**{"dataset": DATA, **options}), batch_size=2, max_samples=7)
    assert sorted(numbers(task.train)) == list(expected)


def test_a_random_sampler_is_read_alike_every_time_and_draws_nothing():
    loader = DataLoader(DATA, sampler=data.WeightedRandomSampler([1.0] * 20, 20), batch_size=2)
    before = torch.get_rng_state()
    first = numbers(made(loader).train)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert numbers(made(loader).train) == first
    assert len(set(first)) < 20


def test_a_stream_is_read_from_its_start_and_kept():
    task = made(DataLoader(Stream(), batch_size=4), max_samples=5)
    assert numbers(task.train) == [0, 1, 2, 3, 4]
    assert torch.equal(task.train.batch(torch.tensor([3, 1]))[0], ROWS[[3, 1]])
    assert task.batch_size == 4
    assert "5" in task.provenance["train"]
    said = {"corpus": "mine"}
    assert made(DataLoader(Stream()), provenance=said).provenance == said


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        ([(ROWS, LABELS)], "`loader`"),
        (DataLoader([ROWS], batch_size=None), "`loader`"),
        (DataLoader([]), "train"),
        (DataLoader(DATA, batch_sampler=repeat([])), "train"),
        (DataLoader(DATA, batch_sampler=[[0], [1]]), "batch_size = None"),
        (DataLoader(DATA, batch_size=21), "batch_size = 21"),
    ],
)
def test_loaders_that_cannot_be_read_are_refused(loader, found):
    with pytest.raises(InputError, match=found):
        made(loader, max_samples=50)
