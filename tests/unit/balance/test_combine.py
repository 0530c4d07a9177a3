"""Aggregators in place of the sum: our own stand-ins always, TorchJD's where it is installed."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    CALLS,
    CLOSE,
    WEIGHTS,
    changed,
    draw,
    gradient_handed_on,
    losses_of,
    times,
)


def rows_of(y, weights):
    """Balanced gradients, one a loss in a row, made by balancing each loss alone."""
    total = sum(weights.values())
    return torch.stack(
        [
            gradient_handed_on(
                LossBalancer({k: 1.0}, total_norm=w / total),
                lambda ys, k=k: losses_of({k: ys[k]}),
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
    """What is expected of a matrix is its own call."""

    gramian_weighting = Weighting()

    def __call__(self, matrix):
        return self.gramian_weighting(matrix @ matrix.T) @ matrix


@CALLS
def test_an_aggregator_sees_balanced_gradients(call):
    y, aggregator = draw(4, 7), ByProducts()
    got = gradient_handed_on(LossBalancer(WEIGHTS, combine=aggregator), losses_of, y, call)
    expected = aggregator(rows_of(y, WEIGHTS)).view_as(y)
    torch.testing.assert_close(got, expected, **CLOSE)
    plain = gradient_handed_on(LossBalancer(WEIGHTS), losses_of, y, call)
    assert (got - plain).abs().max() > 1e-3


class Mean:
    """Weighs all rows alike, so that their number counts."""

    def gramian_weighting(self, products):
        return products.new_full((len(products),), 1 / len(products))


class Sized(Mean):
    """An aggregator with a number for each row."""

    pref_vector = torch.ones(4)


class Remembers(Mean):
    """An aggregator with a memory."""

    def reset(self):
        pass


@CALLS
@pytest.mark.parametrize(
    ("aggregator", "count"), [(Mean(), 2), (Sized(), 4), (Remembers(), 4)], ids=type
)
def test_only_losses_that_may_take_part_are_rows(aggregator, count, call):
    """The host knows that one has no weight or is missing, but only the device that one is broken.

    An aggregator with a number for each row, or a memory of it, has rows of zeros for all.
    """
    y, weights = draw(4, 7), {**WEIGHTS, "watched": 0.0}
    some = changed(l2=lambda y: y.sum() * torch.nan, adv=None, watched=lambda y: y.square().sum())
    got = gradient_handed_on(LossBalancer(weights, combine=aggregator), some, y, call)
    expected = rows_of(y, {"l1": 1.0})[0].view_as(y) / count
    torch.testing.assert_close(got, expected, **CLOSE)


def test_only_losses_without_weight_give_nothing():
    """With the copy of another loss unused, which `backward` would refuse."""
    balancer = LossBalancer({"a": 1.0, "b": 0.0}, combine=ByProducts())
    source = draw(4, 7).requires_grad_()
    balancer.fork(source * 1)["b"].sum().backward()
    assert torch.equal(source.grad, torch.zeros_like(source))


class Drawing(ByProducts):
    """Weighs at random, as PCGrad does by the order it draws."""

    @staticmethod
    def gramian_weighting(products):
        return torch.rand(len(products), dtype=products.dtype)


def test_random_weights_do_not_depend_on_the_callers_generator():
    """So that processes agree, wherever each one's own generator stands."""
    found, y = [], draw(4, 7)
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        balancer = LossBalancer(WEIGHTS, combine=Drawing())
        found.append([gradient_handed_on(balancer, losses_of, y) for _ in range(3)])
        assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # From the same draw the steps would differ by the averages' rounding, 1e-16.
    assert (found[0][0] - found[0][1]).abs().max() > 1e-3
    resumed, fresh = (LossBalancer(WEIGHTS, combine=Drawing()) for _ in range(2))
    resumed.load_state_dict(balancer.state_dict())
    gone_on = gradient_handed_on(balancer, losses_of, y)
    assert torch.equal(gradient_handed_on(resumed, losses_of, y), gone_on)
    balancer.reset()
    begun_anew = gradient_handed_on(balancer, losses_of, y)
    assert torch.equal(begun_anew, gradient_handed_on(fresh, losses_of, y))


def test_a_nest_is_one_row():
    balancer = LossBalancer({"a": 1, "b": 1, "c": 1}, combine=ByProducts())
    first, second = draw(4, 3).requires_grad_(), draw(4, 2, seed=1).half().requires_grad_()
    y = [first * 1, second * 1]
    # Of c only the second tensor has a gradient, of b the first.
    losses = {"a": y[0].sum() + y[1].sum(), "b": (y[0] ** 2).sum(), "c": (2 * y[1]).sum()}
    balancer.backward(losses, y)
    assert first.grad.dtype == torch.float64
    assert second.grad.dtype == torch.float16
    assert torch.isfinite(first.grad).all()
    assert (second.grad > 0).all()


@CALLS
def test_the_total_is_that_of_what_is_handed_on(call):
    y = draw(4, 7)
    balancer = LossBalancer(WEIGHTS, combine=ByProducts(), monitor=True)
    told = {"grad_scale": 16.0, "accumulation_steps": 2}
    got = gradient_handed_on(balancer, times(8), y, call, **told)
    torch.testing.assert_close(balancer.metrics["total"], got.norm() / 8, **CLOSE)
    assert sum(balancer.metrics[f"share_after_{k}"] for k in WEIGHTS) == pytest.approx(1.0)


def test_weights_may_turn_a_gradient_round():
    turned = SimpleNamespace(gramian_weighting=lambda p: torch.tensor([-1.0, 3.0]).double())
    balancer = LossBalancer({"a": 1.0, "b": 1.0}, combine=turned)
    gradient_handed_on(balancer, lambda ys: {k: v.sum() for k, v in ys.items()}, draw(4, 7))
    assert balancer.metrics["share_after_a"].item() == pytest.approx(0.25)
    assert balancer.metrics["share_after_b"].item() == pytest.approx(0.75)


def test_an_aggregator_s_state_is_saved():
    aggregator = nn.Module()
    aggregator.gramian_weighting = Weighting()
    aggregator.register_buffer("seen", torch.ones(2))
    assert "aggregator.seen" in LossBalancer(WEIGHTS, combine=aggregator).state_dict()


def test_what_torchjd_s_names_may_be(monkeypatch):
    class Needy(ByProducts):
        def __init__(self, k):
            super().__init__()

    fake = SimpleNamespace(Known=ByProducts, Needy=Needy, Helper=dict, ConFIG=nn.Identity)
    monkeypatch.setattr("steadygrad.balance.aggregators.import_module", lambda _: fake)
    assert isinstance(LossBalancer(WEIGHTS, combine="Known").aggregator, ByProducts)
    for name in ("Helper", "Nothing", "ConFIG", 3, torch.nanmedian):
        with pytest.raises(InputError, match=r"combine.*gramian_weighting"):
            LossBalancer(WEIGHTS, combine=name)
    with pytest.raises(TypeError, match="'k'"):
        LossBalancer(WEIGHTS, combine="Needy")


@pytest.mark.parametrize("name", ["UPGrad", "MGDA", "AlignedMTL", "DualProj"])
def test_torchjd(name):
    aggregation = pytest.importorskip("torchjd.aggregation")
    y = draw(4, 7)
    got = gradient_handed_on(LossBalancer(WEIGHTS, combine=name), losses_of, y)
    expected = getattr(aggregation, name)()(rows_of(y, WEIGHTS)).view_as(y)
    # The solver's own precision.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)
