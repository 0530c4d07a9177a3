"""`NoiseScale` finds its own micro-batches, and says what it says with contexts, to the bit."""

import copy
import gc
import io
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.contracts.problems import hooks_of
from tests.unit.noise.training_loop import (
    COUNTS,
    Preconditioned,
    Shared,
    accumulate,
    found,
    last,
    left_out,
    losses,
    make,
)

# How passes become micro-batches: in contexts, announced, or found with `samples` alone.
RUNS = ["contexts", "told", "alone"]


def measured(run, model, backwards, sizes, steps=2, **options):
    """The measurements of some steps, of which none is left out."""
    known = iter(sizes * steps)
    noise = NoiseScale(model, samples=(lambda: next(known)) if run == "alone" else None, **options)
    for _ in range(steps):
        model.zero_grad()
        for backward, size in zip(backwards, sizes, strict=True):
            if run == "told":
                noise.samples(size)
            with noise.microbatch(size) if run == "contexts" else nullcontext():
                backward()
        noise.step()
    assert left_out(noise) == (0, 0)
    noise.remove()
    return found(noise)


class Experts(nn.ModuleList):
    """Parts may use other parameters: what ends a part is the end of its pass."""

    def forward(self, x):
        return self[int(x[0, 0] > 0)](x)


def backwards_of(model, x, y, counts=(5, 5), factor=1.0):
    """A step's backward passes, to be made."""
    return [
        lambda a=a, b=b: (losses(model, a, b).mean() * (factor / len(counts))).backward()
        for a, b in zip(x.split([*counts]), y.split([*counts]), strict=True)
    ]


MODELS = {
    "plain": None,
    "preconditioned": None,
    "experts": lambda: Experts([nn.Linear(3, 2), nn.Linear(3, 2)]),
    "shared": Shared,
    "checkpointed": partial(Shared, False),
}


@pytest.mark.parametrize("kind", MODELS)
def test_micro_batches_are_found(kind):
    model, x, y = make(model=MODELS[kind])
    x[:2, 0], x[2:7, 0] = 1, -1  # of different experts
    options = {}
    if kind == "preconditioned":
        options = {"metric": "preconditioned", "optimizer": Preconditioned(model)}
    backwards = backwards_of(model, x, y, COUNTS)
    contexts, *others = (measured(run, model, backwards, COUNTS, **options) for run in RUNS)
    assert torch.isfinite(contexts[:2]).all()
    assert all(torch.equal(other, contexts) for other in others)


@pytest.mark.parametrize("head", [True, False])
def test_reentrant_checkpoints_belong_to_the_pass_around_them(head):
    """Where it has no gradient of its own, its end is not known."""

    class Once(Shared):
        def forward(self, x):
            x = x.clone().requires_grad_()
            return self.head(checkpoint(self.twice, x, use_reentrant=True))

    model, x, y = make(model=Once)
    model.head.requires_grad_(head)
    backwards = backwards_of(model, x, y)
    if head:
        contexts = measured("contexts", model, backwards, [5, 5])
        assert torch.equal(measured("alone", model, backwards, [5, 5]), contexts)
    else:
        with pytest.raises(InputError, match="use_reentrant"):
            measured("alone", model, backwards, [5, 5])


@pytest.mark.parametrize("run", RUNS)
def test_a_micro_batch_without_samples_is_no_part(run):
    model, x, y = make()
    first, second = backwards_of(model, x, y)
    empty = backwards_of(model, x, y, factor=0)[0]
    plain = measured(run, model, [first, second], [5, 5])
    assert torch.equal(measured(run, model, [empty, first, second], [0, 5, 5]), plain)
    assert torch.equal(measured(run, model, [first, empty, second, empty], [5, 0, 5, 0]), plain)


@pytest.mark.parametrize("source", ["found", "microbatch", "accumulated", "per_example"])
@pytest.mark.parametrize("when", ["first", "last"])
def test_a_pass_that_failed_spoils_only_its_step(source, when):
    """One that dies after some parameters have received their gradients."""
    model, x, y = make()
    noise = NoiseScale(model, **({"samples": 5} if source == "found" else {"source": source}))
    around = None if source == "found" else noise

    def fail_halfway():
        hidden = model[:2](x[:5])
        hidden.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError), noise.microbatch(5) if around else nullcontext():
            model[2:](hidden).sum().backward()

    for fails in (False, True, False):
        model.zero_grad()
        if fails and when == "first":
            fail_halfway()
        accumulate(model, x, y, around)
        if fails and when == "last":
            fail_halfway()
        noise.step()
    ring = found(noise)
    assert torch.isfinite(ring[:3]).flatten(1).all(1).tolist() == [True, False, True]
    assert torch.equal(ring[0], ring[2])
    assert left_out(noise) == (1, 0)


def test_a_weight_on_the_device_equals_the_number():
    """A count of tokens; a micro-batch of padding alone weighs nothing."""
    model, x, y = make()
    tokens = torch.tensor([4, 9, 0])
    noises = NoiseScale(model), NoiseScale(model)
    for noise, weights in zip(noises, ([4 / 13, 9 / 13], tokens / tokens.sum()), strict=True):
        model.zero_grad()
        for a, b, n, weight in zip(x.split(COUNTS), y.split(COUNTS), COUNTS, weights, strict=False):
            noise.samples(n, weight=weight)
            (losses(model, a, b).mean() * weight).backward()
        noise.step()
    # 1e-6: the weights are quotients in float32 in one of them.
    assert last(noises[1]) == pytest.approx(last(noises[0]), rel=1e-6)
    for weight in (0.8, -0.2):
        noise.samples(5, weight=torch.tensor(weight))
        (losses(model, x[:5], y[:5]).mean() * weight).backward()
    noise.step()
    assert left_out(noise) == (1, 0)


def test_large_gradients_are_not_held_and_yet_compared():
    """Autograd adds to the first one in place, where nobody holds it."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300).double()
    noise = NoiseScale(model, samples=4)
    for x in torch.randn(3, 4, 300, dtype=torch.float64):
        (model(x).square().mean() / 3).backward()
    noise.step()
    assert left_out(noise) == (0, 0)


@pytest.mark.parametrize("source", ["microbatch", "per_example"])
@pytest.mark.parametrize("ends", ["removed", "dropped"])
def test_an_estimator_that_ends_leaves_no_hooks(source, ends):
    model, x, y = make()

    noise = NoiseScale(model, source=source)
    accumulate(model, x, y, noise)
    assert hooks_of(model) > 0
    if ends == "removed":
        noise.remove()
    else:
        del noise
        gc.collect()
    assert hooks_of(model) == 0


@pytest.mark.parametrize("source", ["microbatch", "per_example"])
def test_a_measured_model_is_copied_and_saved_like_any_other(source):
    model, x, y = make()
    noise = NoiseScale(model, samples=5, source=source)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        accumulate(other, x, y)
    assert noise._sums.parts == 0
    assert b"ExampleNorms" not in file.getvalue()


@pytest.mark.parametrize(
    ("kind", "source", "metric"),
    [
        (nn.Embedding, "microbatch", "euclidean"),
        (nn.Embedding, "microbatch", "preconditioned"),
        (nn.EmbeddingBag, "accumulated", "euclidean"),
        (nn.Embedding, "accumulated", "preconditioned"),
        (nn.Embedding, "per_example", "euclidean"),
    ],
)
def test_sparse_gradients_are_measured_like_dense_ones(kind, source, metric):
    rows, x = [], torch.randint(9, (3, 2, 4, 5))
    for sparse in (False, True):
        torch.manual_seed(0)
        table = kind(9, 4, sparse=sparse)
        model = nn.ModuleList([table, nn.Linear(4, 1)]).double()
        noise = NoiseScale(model, source=source, metric=metric, optimizer=Preconditioned(model))
        for step in x:
            model.zero_grad()
            for part in step:
                with noise.microbatch(4):
                    h = table(part)
                    (model[1](h if h.dim() == 2 else h.mean(1)).square().mean() / 2).backward()
            assert model[0].weight.grad.is_sparse is sparse
            noise.step()
        assert left_out(noise) == (0, 0)
        rows.append(found(noise))
    # 1e-12: rows are added up in another order.
    assert torch.allclose(*rows, rtol=1e-12)
    assert rows[0].abs().sum() > 0


def test_one_micro_batch_in_the_first_step_is_a_mistake():
    """At an epoch's end there may be such a step."""
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    accumulate(model, x[:5], y[:5], counts=(5,))
    with pytest.raises(InputError, match="parts"):
        noise.step()
