"""Aggregators in place of the sum: our own stand-ins always, TorchJD's where it is installed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import WEIGHTS, draw, gradient_handed_on, losses_of

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


def rows_of(make_losses, y, weights):
    """Balanced gradients, one a loss in a row, made by balancing each loss alone."""
    total = sum(weights.values())
    return torch.stack(
        [
            gradient_handed_on(
                LossBalancer({k: 1.0}, total_norm=w / total),
                lambda ys, k=k: {k: make_losses({k: ys[k]})[k]},
                y,
            ).flatten()
            for k, w in weights.items()
        ]
    )


class Weighting(nn.Module):
    """Weighs each gradient by how much all of them point its way."""

    def forward(self, products):
        return 1 + products.sum(0)


class ByProducts:
    gramian_weighting = Weighting()

    def __call__(self, matrix):
        return self.gramian_weighting(matrix @ matrix.T) @ matrix


class ByMatrix(nn.Module):
    """The coordinates' median, which no inner product tells."""

    def forward(self, matrix):
        return matrix.median(dim=0).values


@CALLS
@pytest.mark.parametrize("aggregator", [ByProducts(), ByMatrix()], ids=["products", "matrix"])
def test_an_aggregator_sees_balanced_gradients(call, aggregator):
    y = draw(4, 7)
    got = gradient_handed_on(LossBalancer(WEIGHTS, combine=aggregator), make, y, call)
    expected = aggregator(rows_of(make, y, WEIGHTS)).view_as(y)
    torch.testing.assert_close(got, expected, **CLOSE)
    plain = gradient_handed_on(LossBalancer(WEIGHTS), make, y, call)
    assert (got - plain).abs().max() > 1e-3


@pytest.mark.parametrize("aggregator", [ByProducts(), ByMatrix()], ids=["products", "matrix"])
def test_missing_and_broken_losses_are_rows_of_zeros(aggregator):
    y = draw(4, 7)
    broken = lambda ys: {"l1": make(ys)["l1"], "l2": ys["l2"].sum() * torch.nan}  # noqa: E731
    got = gradient_handed_on(LossBalancer(WEIGHTS, combine=aggregator), broken, y)
    row = rows_of(make, y, {"l1": 1.0})[0]
    expected = aggregator(torch.stack([row, 0 * row, 0 * row])).view_as(y)
    torch.testing.assert_close(got, expected, **CLOSE)


def test_a_nest_is_one_row():
    balancer = LossBalancer({"a": 1, "b": 1, "c": 1}, combine=ByMatrix())
    first, second = draw(4, 3).requires_grad_(), draw(4, 2, seed=1).half().requires_grad_()
    y = [first * 1, second * 1]
    losses = {"a": y[0].sum() + y[1].sum(), "b": (y[0] ** 2).sum(), "c": (2 * y[1]).sum()}
    balancer.backward(losses, y)
    assert first.grad.dtype == torch.float64
    assert second.grad.dtype == torch.float16
    # Of c only the second tensor has a gradient, of b the first: medians lie in between.
    assert torch.isfinite(first.grad).all()
    assert (second.grad > 0).all()


def test_an_aggregator_s_state_is_saved():
    aggregator = ByMatrix()
    aggregator.register_buffer("seen", torch.ones(2))
    assert "aggregator.seen" in LossBalancer(WEIGHTS, combine=aggregator).state_dict()


def test_what_torchjd_s_names_may_be(monkeypatch):
    class Aggregator(nn.Module):
        pass

    class Known(Aggregator):
        gramian_weighting = Weighting()

    class Needy(Aggregator):
        def __init__(self, k):
            super().__init__()

    fake = SimpleNamespace(Aggregator=Aggregator, Known=Known, Needy=Needy, Helper=dict)
    monkeypatch.setattr("steadygrad.balance.combine.import_module", lambda _: fake)
    assert isinstance(LossBalancer(WEIGHTS, combine="Known").aggregator, Known)
    for name, match in [
        ("Needy", "no arguments"),
        ("Helper", "aggregator of TorchJD"),
        ("Nothing", "aggregator of TorchJD"),
    ]:
        with pytest.raises(InputError, match=match):
            LossBalancer(WEIGHTS, combine=name)


@CALLS
@pytest.mark.parametrize("name", ["UPGrad", "MGDA", "AlignedMTL", "Mean", "Sum", "ConFIG"])
def test_torchjd(name, call):
    aggregation = pytest.importorskip("torchjd.aggregation")
    y = draw(4, 7)
    got = gradient_handed_on(LossBalancer(WEIGHTS, combine=name), make, y, call)
    expected = getattr(aggregation, name)()(rows_of(make, y, WEIGHTS)).view_as(y)
    # The solver's own precision.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
    if name == "Sum":
        plain = gradient_handed_on(LossBalancer(WEIGHTS), make, y, call)
        torch.testing.assert_close(got, plain, **CLOSE)


def test_upgrad_resolves_a_conflict():
    """Opposed gradients: no loss gets worse, which the sum cannot say."""
    pytest.importorskip("torchjd.aggregation")
    a = torch.tensor([1.0, 0.0], dtype=torch.float64)
    b = torch.tensor([-0.8, 0.6], dtype=torch.float64)
    conflict = lambda ys: {"a": (ys["a"] @ a).sum(), "b": 100 * (ys["b"] @ b).sum()}  # noqa: E731
    weights = {"a": 1.0, "b": 5.0}
    summed = gradient_handed_on(LossBalancer(weights), conflict, draw(1, 2))
    resolved = gradient_handed_on(LossBalancer(weights, combine="UPGrad"), conflict, draw(1, 2))
    assert (summed @ a).item() < -0.1
    assert (resolved @ a).item() > -1e-6
    assert (resolved @ b).item() > -1e-6
