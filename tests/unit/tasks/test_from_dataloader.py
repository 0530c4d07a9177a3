"""Tasks from data loaders: the samples behind the batches, whatever kind of loader it is."""

from dataclasses import fields

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from steadygrad._checks import InputError
from steadygrad.tasks import Task, TensorSamples

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, torch.arange(12))


def made(loader, **options):
    defaults = {
        "valid": TensorSamples((X, torch.arange(12))),
        "per_sample_loss": lambda model, batch: model(batch[0]).square().mean(1),
        "lr": 0.1,
        "make_model": lambda: nn.Linear(3, 2),
    }
    return Task.from_dataloader(loader, **{**defaults, **options})


def numbers(samples):
    """The second column, which numbers the rows of DATA."""
    return samples.batch(torch.arange(len(samples)))[1].tolist()


class Words(Dataset):
    """Rows of different lengths; row i has the numbers 0 to i."""

    def __init__(self, count=6):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.arange(i + 1.0)


class AtOnce(Words):
    def __getitems__(self, keys):
        return [self[i] + 100 for i in keys]


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(X, range(12), strict=True)


def pad(rows):
    return nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)


def test_a_map_style_data_set_is_collated_in_any_order_and_size():
    task = made(DataLoader(Words(), batch_size=2, collate_fn=pad), valid=DataLoader(Words(3)))
    assert (len(task.train), len(task.valid)) == (6, 3)
    found = task.train.batch(torch.tensor([2, 0, 1])).tolist()
    assert found == [[0, 1, 2], [0, -1, -1], [0, 1, -1]]
    # Many rows at once, where the data set has them.
    task = made(DataLoader(AtOnce(), batch_size=2, collate_fn=pad))
    assert task.train.batch(torch.tensor([1, 0])).tolist() == [[100, 101], [100, -1]]


def test_fields_of_the_loader_and_of_the_caller():
    loader = DataLoader(DATA, batch_size=4, num_workers=2)
    task = made(loader)
    assert (task.name, task.sample) == ("my-model", "sample")
    assert (task.batch_size, task.loader_workers) == (4, 2)
    assert task.make_optimizer is torch.optim.AdamW
    changes = {"name": "mine", "batch_size": 3, "loader_workers": 0, "micro_batch_size": 2}
    changes |= {"make_optimizer": torch.optim.SGD, "lr_rule": "linear"}
    task = made(loader, **changes)
    assert {f.name: getattr(task, f.name) for f in fields(task) if f.name in changes} == changes


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"shuffle": True, "batch_size": 5, "drop_last": True}, range(12)),
        ({"sampler": DistributedSampler(DATA, num_replicas=2, rank=1)}, range(12)),
        ({"sampler": RandomSampler(DATA, replacement=True), "batch_size": 2}, range(12)),
        ({"sampler": SubsetRandomSampler([7, 1, 4])}, [1, 4, 7]),
        ({"sampler": WeightedRandomSampler([0.0] * 3 + [1.0] + [0.0] * 8, 5)}, [3] * 5),
        ({"batch_sampler": [[2, 0], [11]]}, [0, 2, 11]),
        ({"batch_sampler": BatchSampler(SequentialSampler(range(4)), 3, True)}, range(4)),
    ],
)
def test_the_sampler_says_which_samples_there_are(options, expected):
    task = made(DataLoader(DATA, **options), batch_size=2)
    assert sorted(numbers(task.train)) == list(expected)


def test_a_random_sampler_is_read_alike_every_time_and_draws_nothing():
    loader = DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 12, 12), batch_size=2)
    before = torch.get_rng_state()
    first = numbers(made(loader).train)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(1)
    assert numbers(made(loader).train) == first
    assert len(set(first)) < 12


def test_an_endless_sampler_is_cut():
    class Endless:
        def __iter__(self):
            while True:
                yield from range(3)

    class Empty(BatchSampler):
        def __iter__(self):
            while True:
                yield []

    loader = DataLoader(DATA, sampler=Endless(), batch_size=2)
    assert numbers(made(loader, max_samples=7).train) == [0, 1, 2] * 4  # as many as there are rows
    loader = DataLoader(DATA, batch_sampler=Empty(SequentialSampler(DATA), 2, False))
    with pytest.raises(InputError, match="train"):
        made(loader, max_samples=50)


def test_subsets_and_batches_of_loaders_agree_with_the_loop():
    loader = DataLoader(Subset(DATA, [5, 2, 8]), batch_size=2)
    again = made(loader).train.batch(torch.arange(2))
    assert all(torch.equal(a, b) for a, b in zip(next(iter(loader)), again, strict=True))


def test_a_stream_is_read_from_its_start_and_kept():
    task = made(DataLoader(Stream(), batch_size=4), max_samples=5)
    assert numbers(task.train) == [0, 1, 2, 3, 4]
    assert torch.equal(task.train.batch(torch.tensor([3, 1]))[0], X[[3, 1]])
    assert task.batch_size == 4
    assert "5" in task.provenance["train"]
    said = {"corpus": "mine"}
    assert made(DataLoader(Stream()), provenance=said).provenance == said


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        ([(X, torch.arange(12))], "`loader`"),
        (DataLoader([X], batch_size=None), "`loader`"),
        (DataLoader([]), "train"),
        (DataLoader(DATA, batch_sampler=[[0], [1]]), "batch_size = None"),
        (DataLoader(DATA, batch_size=13), "batch_size = 13"),
    ],
)
def test_loaders_that_cannot_be_read_are_refused(loader, found):
    with pytest.raises(InputError, match=found):
        made(loader)
