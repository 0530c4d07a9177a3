"""Calls that fail midway count nothing, and one fork is gone through once."""

import warnings

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from steadygrad.balance import partials
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
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
    return {**state, **balancer.metrics, "host": torch.tensor(balancer.core.host_draws)}


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

    def __init__(self, found, products):
        super().__init__()
        self.found, self.calls = found, 0
        if products:
            self.gramian_weighting = lambda matrix: self.answer(matrix, matrix.new_ones(3))

    def answer(self, matrix, right):
        self.calls += 1
        if self.calls <= 3:
            return right
        if self.found == "raises":
            raise ArithmeticError("no convergence")
        return {"short": right[1:], "column": right[:, None], "list": right.tolist()}[self.found]

    def forward(self, matrix):
        return self.answer(matrix, matrix.sum(0))


@CALLS
@pytest.mark.parametrize("products", [True, False])
@pytest.mark.parametrize("found", ["raises", "short", "column", "list"])
def test_an_aggregator_that_fails(call, products, found):
    balancer, before = used(combine=Breaks(found, products))
    source = draw(4, 7).requires_grad_()
    match = {"short": r"found \(2,\)|found \(27,\)", "column": r", 1\)", "list": "found list"}
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
    with pytest.raises(InputError, match=r"one backward pass.*Remedy: add the losses up"):
        losses[1].backward()
    assert_nothing_counted(balancer, before)
    assert torch.equal(source.grad, gradient)
    # A fork of its own may follow, and a pass that failed does not count as one.
    gradient_handed_on(balancer, make, draw(4, 7), "fork")
    assert balancer.core.averages.steps.mass[1] == 1.0


def test_a_fork_whose_pass_failed_may_be_gone_through_again():
    balancer = LossBalancer(WEIGHTS, combine=Breaks("raises", products=False))
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
            with pytest.raises(InputError, match=r"'a'.*compiled.*Remedy: `fork\(y\)`"):
                balancer.backward(losses, y)
            assert source.grad is None
            assert balancer.core.averages.steps.mass.sum() == 0
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
    visited, walk = [], partials._upstream
    monkeypatch.setattr(partials, "_upstream", lambda *a: visited.append(walk(*a)) or visited[-1])
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


@pytest.mark.parametrize("decay", [0.9, 0.9995, 0.9999])
@pytest.mark.parametrize("average", ["running", "ema"])
def test_an_average_of_models_keeps_the_losses_names(average, decay):
    """It is taken of buffers too, the names among them."""
    model = nn.ModuleDict({"balancer": LossBalancer(WEIGHTS), "layer": nn.Linear(2, 2)})
    multi = torch.optim.swa_utils.get_ema_multi_avg_fn(decay) if average == "ema" else None
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=multi, use_buffers=True)
    for seed in range(5):
        gradient_handed_on(model["balancer"], make, draw(4, 7, seed=seed))
        averaged.update_parameters(model)
    other = LossBalancer(dict(reversed(WEIGHTS.items())))
    other.load_state_dict(averaged.module["balancer"].state_dict())
    assert dict(other.weights) == pytest.approx(dict(WEIGHTS), rel=1e-12)


def test_names_that_are_none_are_refused():
    state = LossBalancer(WEIGHTS).state_dict()
    state["core.names_json"] += 3
    with pytest.raises(InputError, match=r"losses' names.*Remedy"):
        LossBalancer(WEIGHTS).load_state_dict(state)


def test_a_loss_that_is_left_out_counts_for_nothing_in_the_effective_loss():
    y = draw(4, 7).requires_grad_()
    nothing = torch.zeros(4, 7, dtype=torch.bool)
    losses = {"mse": (y - TARGET).square().mean(), "l1": y[nothing].mean()}
    balancer = LossBalancer({"mse": 1.0, "l1": 1.0})
    found = balancer.backward(losses, y)
    assert losses["l1"].isnan()
    assert torch.isfinite(found)
    assert torch.isfinite(y.grad).all()


class Hidden:
    def __init__(self, z):
        self.z = z


class OwnDict(dict):
    pass


@pytest.mark.parametrize("wrap", [Hidden, lambda z: OwnDict(z=z), lambda z: OwnDict(a=Hidden(z))])
def test_tensors_where_torch_does_not_look_are_refused(wrap):
    y = draw(4, 7).requires_grad_()
    balancer = LossBalancer(WEIGHTS)
    for nest in ({"w": y, "extra": wrap(y)}, wrap(y)):
        with pytest.raises(InputError, match="cannot be looked into"):
            balancer.fork(nest)
    known = {"w": y, "note": "text", "config": Hidden(3)}
    assert set(balancer.fork(known)) == set(WEIGHTS)


@pytest.mark.filterwarnings("ignore:for core")  # torch says that a copy to `meta` does nothing
@pytest.mark.parametrize("assign", [True, False])
def test_a_state_is_loaded_into_a_balancer_on_meta(assign):
    trained = LossBalancer(WEIGHTS)
    gradient_handed_on(trained, make, draw(4, 7))
    with torch.device("meta"):
        built = LossBalancer(WEIGHTS)
    if not assign:
        with pytest.raises(InputError, match="assign=True"):
            built.load_state_dict(trained.state_dict())
        return
    built.load_state_dict(trained.state_dict(), assign=True)
    twin = gradient_handed_on(trained, make, draw(4, 7, seed=5))
    assert torch.equal(gradient_handed_on(built, make, draw(4, 7, seed=5)), twin)


@CALLS
def test_an_aggregator_cannot_hide_an_overflow_from_the_scaler(call):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4)
    balancer = LossBalancer(
        {"a": 1.0, "b": 1.0}, combine=lambda m: m.nan_to_num(0, 0, 0).sum(0), grad_scale=scaler
    )
    x = draw(4, 7).requires_grad_()
    y = x * 1
    scaler.scale(torch.zeros(()))  # so that the scaler has its scale
    if call == "fork":
        ys = balancer.fork(y)
        (ys["a"].sum() * torch.inf + ys["b"].square().sum()).backward()
    else:
        balancer.backward({"a": y.sum() * torch.inf, "b": y.square().sum()}, y)
    assert x.grad.isnan().all()
