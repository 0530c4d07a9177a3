"""Calls that fail midway count nothing, and one fork is gone through once."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from steadygrad.balance import graphs
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
    mass_of,
    run,
    same_y,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


def used(**options):
    """A balancer in the midst of an accumulation, and all that a call may change."""
    balancer = LossBalancer(WEIGHTS, accumulation_steps=2, **options)
    for seed in range(3):
        gradient_handed_on(balancer, make, draw(4, 7, seed=seed))
    return balancer, kept(balancer)


def kept(balancer):
    state = {k: v.clone() for k, v in balancer.state_dict().items()}
    return {**state, **balancer.metrics}


def assert_nothing_counted(balancer, before):
    after = kept(balancer)
    assert after.keys() == before.keys()
    for key, value in after.items():
        same = torch.equal(value.nan_to_num(-1.0), before[key].nan_to_num(-1.0))
        assert same, key


@CALLS
def test_a_head_s_graph_that_is_freed(call):
    balancer, before = used()
    y = draw(4, 7).requires_grad_() * 1
    ys = balancer.fork(y) if call == "fork" else same_y(y)
    # Of its losses the first two are differentiated before the third one fails.
    losses = {**losses_of(ys, TARGET), "adv": ys["adv"].exp().mean()}
    torch.autograd.grad(losses["adv"], ys["adv"])
    with pytest.raises(RuntimeError, match="second time"):
        sum(losses.values()).backward() if call == "fork" else balancer.backward(losses, y)
    assert_nothing_counted(balancer, before)


def test_a_model_s_graph_that_is_freed():
    balancer, before = used()
    source = draw(4, 7).requires_grad_()
    y = source.exp()
    y.sum().backward()
    with pytest.raises(RuntimeError, match="second time"):
        balancer.backward(make(same_y(y)), y)
    assert_nothing_counted(balancer, before)


class Breaks(nn.Module):
    """An aggregator that returns what it is told to, from its second call on."""

    def __init__(self, found):
        super().__init__()
        self.found, self.calls = found, 0

    def gramian_weighting(self, products):
        self.calls, right = self.calls + 1, products.new_ones(3)
        if self.calls <= 3:
            return right
        if self.found == "raises":
            raise ArithmeticError("no convergence")
        return {"short": right[1:], "column": right[:, None], "list": right.tolist()}[self.found]


@CALLS
@pytest.mark.parametrize("found", ["raises", "short", "column", "list"])
def test_an_aggregator_that_fails(call, found):
    balancer, before = used(combine=Breaks(found))
    source = draw(4, 7).requires_grad_()
    match = {"short": r"Found \(2,\)", "column": r", 1\)", "list": "Found list"}
    with pytest.raises((ArithmeticError, InputError), match=match.get(found, "no convergence")):
        run(balancer, source * 1, TARGET, call)
    assert source.grad is None
    assert_nothing_counted(balancer, before)


@CALLS
def test_after_a_failure_the_next_step_is_as_if_there_had_been_none(call):
    twins = [LossBalancer(WEIGHTS, accumulation_steps=2) for _ in range(2)]
    got = []
    for balancer in twins:
        for seed in range(5):
            if balancer is twins[0]:
                y = draw(4, 7, seed=9).requires_grad_().exp()
                y.sum().backward()
                with pytest.raises(RuntimeError, match="second time"):
                    balancer.backward(make(same_y(y)), y)
            got.append(gradient_handed_on(balancer, make, draw(4, 7, seed=seed), call))
    for one, other in zip(got[:5], got[5:], strict=True):
        assert torch.equal(one, other)


def test_each_loss_s_own_backward_through_one_fork_is_refused():
    """The second pass would see one loss alone, with all of the total, and count as a step."""
    balancer = LossBalancer(WEIGHTS)
    source = draw(4, 7).requires_grad_()
    losses = list(make(balancer.fork(source * 1)).values())
    losses[0].backward()
    before, gradient = kept(balancer), source.grad.clone()
    with pytest.raises(InputError, match="one backward pass"):
        losses[1].backward()
    assert_nothing_counted(balancer, before)
    assert torch.equal(source.grad, gradient)
    # A fork of its own may follow, and a pass that failed does not count as one.
    gradient_handed_on(balancer, make, draw(4, 7), "fork")
    assert mass_of(balancer)[1] == 1.0


def test_a_fork_whose_pass_failed_may_be_gone_through_again():
    balancer = LossBalancer(WEIGHTS, combine=Breaks("raises"))
    balancer.aggregator.calls = 3
    source = draw(4, 7).requires_grad_()
    loss = sum(make(balancer.fork(source * 1)).values())
    with pytest.raises(ArithmeticError):
        loss.backward(retain_graph=True)
    balancer.aggregator.calls = 0
    loss.backward()
    plain = gradient_handed_on(LossBalancer(WEIGHTS), make, draw(4, 7))
    torch.testing.assert_close(source.grad, plain, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("donated", [True, False])
def test_losses_that_share_a_compiled_head(donated):
    """A compiled backward pass writes over what it kept, unless it is told not to."""
    torch._dynamo.reset()
    with warnings.catch_warnings(), functorch.patch(donated_buffer=donated):
        warnings.simplefilter("ignore")  # the compiler's own
        head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2)).double()
        compiled = torch.compile(head, backend="aot_eager")
        compiled(draw(4, 7).requires_grad_()).mean().backward()
        balancer, source = LossBalancer({"a": 1, "b": 1}), draw(4, 7).requires_grad_()
        y = source * 1
        shared = lambda h, ys: {"a": h(ys)[:, 0].mean(), "b": (3 * h(ys)[:, 1]).mean()}  # noqa: E731
        out = compiled(y)
        losses = shared(lambda _: out, y)
        if donated:
            with pytest.raises(RuntimeError, match="donated_buffer"):
                balancer.backward(losses, y)
            assert source.grad is None
            assert mass_of(balancer).sum() == 0
            # The remedy: each loss's own copy through the head.
            ys = balancer.fork(y)
            sum(shared(compiled, ys[k])[k] for k in ys).backward()
        else:
            balancer.backward(losses, y)
    expected = gradient_handed_on(
        LossBalancer({"a": 1, "b": 1}),
        lambda ys: {k: shared(head, ys[k])[k] for k in ys},
        draw(4, 7),
    )
    torch.testing.assert_close(source.grad, expected, rtol=1e-11, atol=1e-14)


def test_one_walk_for_all_outputs_and_one_for_each_loss(monkeypatch):
    """Whatever their number: with a walk for each, hundreds of outputs took seconds."""
    visited, walk = [], graphs._upstream
    monkeypatch.setattr(graphs, "_upstream", lambda *a: visited.append(walk(*a)) or visited[-1])
    source = draw(4, 7).requires_grad_()
    y, x = [], source
    for _ in range(50):
        x = x.tanh()
        y.append(x * 1)
    losses = {k: sum(leaf.abs().mean() * i for leaf in y) for i, k in enumerate("ab", 1)}
    LossBalancer({"a": 1, "b": 1}).backward(losses, y)
    # What is upstream of all outputs: 50 tanh and the source.
    assert len(visited[0]) == 51
    assert len(visited) == 3


class Skips:
    """A scaler as far as it is asked."""

    def scale(self, outputs):
        return 2 * outputs


@CALLS
def test_an_aggregator_cannot_hide_an_overflow(call):
    """The scaler has to see it, or every step from now on overflows."""
    alike = SimpleNamespace(gramian_weighting=lambda products: products.new_ones(3))
    balancer = LossBalancer(WEIGHTS, combine=alike, grad_scale=Skips())
    broken = lambda ys: {**make(ys), "l2": ys["l2"].sum() * torch.inf}  # noqa: E731
    assert gradient_handed_on(balancer, broken, draw(4, 7), call).isnan().all()
    assert mass_of(balancer).tolist() == [0.0] * 3
    assert torch.isfinite(gradient_handed_on(balancer, make, draw(4, 7), call)).all()
