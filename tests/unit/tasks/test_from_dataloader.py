"""Tasks from data loaders: the samples behind the batches, whatever kind of loader it is."""

from collections import namedtuple
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
from steadygrad.tasks import Task, TaskError, TensorSamples, mean_loss

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(X, torch.arange(12))


def losses(model, batch):
    return model(batch[0]).square().mean(1)


def made(loader, **options):
    defaults = {
        "valid": TensorSamples((X, torch.arange(12))),
        "per_sample_loss": losses,
        "lr": 0.1,
        "model": nn.Linear(3, 2),
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
    assert task.batch_size == 2
    assert (len(task.train), len(task.valid)) == (6, 3)
    assert task.train.batch(torch.tensor([2, 0, 1])).tolist() == [
        [0, 1, 2],
        [0, -1, -1],
        [0, 1, -1],
    ]
    assert task.train.batch(torch.tensor([0])).tolist() == [[0]]


@pytest.mark.parametrize("rows", [Words(), [{"x": Words()[i]} for i in range(6)], [[1], [1, 2]]])
def test_unequal_rows_without_a_collate_fn(rows):
    task = made(DataLoader(rows, batch_size=2), valid=TensorSamples(X))
    with pytest.raises(InputError, match=r"one shape.*Remedy: .*collate_fn") as error:
        task.train.batch(torch.arange(2))
    assert "\n" not in str(error.value)


def test_a_data_set_that_fetches_many_rows_at_once_does():
    task = made(DataLoader(AtOnce(), batch_size=2, collate_fn=pad))
    assert task.train.batch(torch.tensor([1, 0])).tolist() == [[100, 101], [100, -1]]


def test_fields_of_the_loader_and_of_the_caller():
    loader = DataLoader(DATA, batch_size=4, num_workers=2)
    task = made(loader)
    assert (task.name, task.sample, task.batch_size, task.loader_workers) == (
        "Linear",
        "sample",
        4,
        2,
    )
    assert type(task.make_optimizer([nn.Parameter(X)], 0.1)) is torch.optim.AdamW
    changes = {"name": "mine", "batch_size": 3, "loader_workers": 0, "micro_batch_size": 2}
    task = made(loader, **changes, make_optimizer=torch.optim.SGD, lr_rule="linear")
    assert {f.name: getattr(task, f.name) for f in fields(task) if f.name in changes} == changes
    assert (task.make_optimizer, task.lr_rule) == (torch.optim.SGD, "linear")


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
    torch.manual_seed(1)
    assert numbers(made(loader).train) == first
    assert len(set(first)) < 12
    torch.set_rng_state(before)


def test_an_endless_sampler_is_cut():
    class Endless:
        def __iter__(self):
            while True:
                yield from range(3)

    loader = DataLoader(DATA, sampler=Endless(), batch_size=2)
    assert numbers(made(loader, max_samples=7).train) == [0, 1, 2] * 4  # as many as there are rows


def test_subsets_and_batches_of_loaders_agree_with_the_loop():
    loader = DataLoader(Subset(DATA, [5, 2, 8]), batch_size=2)
    task = made(loader)
    first = next(iter(loader))
    again = task.train.batch(torch.arange(2))
    assert [torch.equal(a, b) for a, b in zip(first, again, strict=True)] == [True, True]


def test_a_stream_is_read_from_its_start_and_kept():
    task = made(DataLoader(Stream(), batch_size=4), max_samples=5)
    assert numbers(task.train) == [0, 1, 2, 3, 4]
    assert torch.equal(task.train.batch(torch.tensor([3, 1]))[0], X[[3, 1]])
    assert task.batch_size == 4
    assert task.provenance == {"train": "the first 5 samples of a stream"}
    assert made(DataLoader(Stream()), provenance={"corpus": "mine"}).provenance == {
        "corpus": "mine"
    }


Pair = namedtuple("Pair", ["x", "n"])


@pytest.mark.parametrize(
    "loader",
    [
        [(X[:5], torch.arange(5)), (X[5:], torch.arange(5, 12))],
        [Pair(X[:5], torch.arange(5)), Pair(X[5:], torch.arange(5, 12))],
        DataLoader([(X[:5], torch.arange(5)), (X[5:], torch.arange(5, 12))], batch_size=None),
    ],
    ids=["list", "named", "loader"],
)
def test_ready_batches_are_cut_into_samples(loader):
    task = made(loader, max_samples=8)
    assert numbers(task.train) == list(range(8))
    batch = task.train.batch(torch.tensor([6, 0]))
    assert torch.equal(batch[0], X[[6, 0]])
    assert type(batch) is type(next(iter(loader)))
    assert task.batch_size == 5


def test_ready_batches_by_name_are_dictionaries():
    task = made([{"x": X, "n": torch.arange(12)}], per_sample_loss=lambda m, b: losses(m, [b["x"]]))
    assert task.train.batch(torch.tensor([2]))["n"].tolist() == [2]


@pytest.mark.parametrize(
    ("loader", "found"),
    [
        ([], "`loader`.*Found .*no batch"),
        ([(X, "text")], r"`loader`.*Found loader\[0\]: \(12, 3\), loader\[1\]: str"),
        ([(X, X[:5])], r"loader\[0\]: \(12, 3\), loader\[1\]: \(5, 3\)"),
        ([torch.tensor(1.0)], r"Found loader: \(\)"),
        ([()], "Found no tensor"),
        ([X, X[:, :2]], "Found RuntimeError: Sizes of tensors must match"),
        ([{"x": X}, {"y": X}], "Found ValueError: batches of different structure"),
        (DataLoader(DATA, batch_sampler=[[0], [1]]), "`batch_size`.*Found `batch_size = None`"),
        (DataLoader(DATA, batch_size=13), "batch is larger than the data"),
    ],
)
def test_loaders_that_cannot_be_read_are_refused(loader, found):
    with pytest.raises(InputError, match=rf"{found}.*Remedy"):
        made(loader)


@pytest.mark.parametrize(
    ("models", "found"),
    [
        ({"model": None}, "Found neither"),
        ({"make_model": lambda: nn.Linear(3, 2)}, "Found both"),
    ],
)
def test_one_way_to_make_the_model(models, found):
    with pytest.raises(InputError, match=rf"{found}.*Remedy"):
        made(DataLoader(DATA, batch_size=2), **models)


def test_every_model_starts_from_the_weights_at_the_time():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    task = made(DataLoader(DATA, batch_size=2), model=model)
    nn.init.zeros_(model.weight)
    first, second = task.make_model(), task.make_model()
    nn.init.zeros_(first.weight)
    assert torch.equal(second.weight, before)
    made_afresh = made(DataLoader(DATA, batch_size=2), model=None, make_model=lambda: model)
    assert made_afresh.make_model() is model
    assert made_afresh.name == "my-model"


def test_a_model_that_cannot_be_copied_is_one_line():
    model = nn.Linear(3, 2)
    model.stream = (i for i in range(3))
    with pytest.raises(TaskError, match=r"copy of the model.*Found TypeError.*Remedy"):
        made(DataLoader(DATA, batch_size=2), model=model)


def test_it_trains():
    torch.manual_seed(0)
    task = made(DataLoader(DATA, batch_size=4), model=nn.Linear(3, 2), micro_batch_size=5)
    model = task.make_model()
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    for start in range(0, 48, 4):
        batch = task.train.batch(torch.arange(start, start + 4) % 12)
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    # A linear layer that is to put out zeros: AdamW goes 0.1 a step from weights below 0.6.
    assert mean_loss(task, model) < 0.2 * before


@pytest.mark.parametrize("first", [0, 2])
def test_an_endless_stream_of_empty_batches_ends(first):
    def stream():
        yield from [(X[:first], torch.arange(first))] * bool(first)
        while True:
            yield X[:0], torch.arange(0)

    if first:
        assert len(made(stream(), batch_size=1, max_samples=50).train) == first
    else:
        with pytest.raises(InputError, match="`train`"):
            made(stream(), batch_size=1, max_samples=50)


def test_an_endless_sampler_of_empty_batches_ends():
    class Empty(BatchSampler):
        def __iter__(self):
            while True:
                yield []

    loader = DataLoader(DATA, batch_sampler=Empty(SequentialSampler(DATA), 2, False))
    with pytest.raises(InputError, match="`train`"):
        made(loader, max_samples=50)
