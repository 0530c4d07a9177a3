"""Training frameworks around a balancer: averaged copies, casts, modules as options, odd nests."""

import copy

import pytest
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


def inside_of_a_model():
    return nn.ModuleDict({"net": nn.Linear(1, 1), "balancer": LossBalancer(WEIGHTS)})


def averaged_in_place(model, decay):
    """The rule of averages that run over the whole state dict, integers included."""
    kept = copy.deepcopy(model)
    for _ in range(20):
        for old, new in zip(kept.state_dict().values(), model.state_dict().values(), strict=True):
            old.copy_(decay * old + (1.0 - decay) * new)
    return kept


def averaged_by_torch(model, **rule):
    kept = AveragedModel(model, use_buffers=True, **rule)
    for _ in range(20):
        kept.update_parameters(model)
    return kept.module


AVERAGES = {
    "mean": lambda m, _: averaged_by_torch(m),
    "avg_fn": lambda m, d: averaged_by_torch(m, avg_fn=get_ema_avg_fn(d)),
    "multi_avg_fn": lambda m, d: averaged_by_torch(m, multi_avg_fn=get_ema_multi_avg_fn(d)),
    "in place": averaged_in_place,
}


@pytest.mark.parametrize("rule", AVERAGES)
def test_a_copy_whose_buffers_are_averaged_can_be_loaded(rule):
    model = inside_of_a_model()
    gradient_handed_on(model["balancer"], make, draw(4, 7))
    # The second one is the constructor's; the others have other roundings.
    for decay in (0.9, 0.95, 0.99, 0.999, 0.9995, 0.9998, 0.9999):
        saved = AVERAGES[rule](model, decay).state_dict()
        other = nn.ModuleDict({"net": nn.Linear(1, 1), "balancer": LossBalancer({
            "adv": 1.0, "l1": 1.0, "l2": 1.0})})  # fmt: skip
        other.load_state_dict(saved)
        assert other["balancer"].weights == pytest.approx(WEIGHTS)
        assert LossBalancer({"adv": 1.0, "l1": 1.0, "l2": 1.0}).state_dict().keys() == {
            k.removeprefix("balancer.") for k in saved if k.startswith("balancer.")
        }


def test_a_row_of_another_length_is_refused():
    state = LossBalancer(WEIGHTS).state_dict()
    state["state.loss_l2"] = state["state.loss_l2"][:7]
    with pytest.raises(RuntimeError, match="size mismatch"):
        LossBalancer(WEIGHTS).load_state_dict(state)


class Scale(nn.Module):
    """A gradient scaler that is a module."""

    def scale(self, x):
        return 1024 * x


def test_a_scaler_that_is_a_module_is_heard_and_stays_outside():
    balancer = LossBalancer(WEIGHTS, grad_scale=Scale())
    plain = gradient_handed_on(LossBalancer(WEIGHTS), make, draw(4, 7))
    loud = lambda ys: {k: 1024 * v for k, v in make(ys).items()}  # noqa: E731
    assert torch.equal(gradient_handed_on(balancer, loud, draw(4, 7)), 1024 * plain)
    assert balancer.state_dict().keys() == LossBalancer(WEIGHTS).state_dict().keys()


def test_a_copy_asks_the_same_scaler():
    scaler = GradScaler("cpu", init_scale=4.0)
    balancer = LossBalancer(WEIGHTS, grad_scale=scaler)
    twin = copy.deepcopy(nn.ModuleDict({"b": balancer}))["b"]
    assert twin.options.grad_scale is balancer.options.grad_scale is scaler


@pytest.mark.parametrize("cast", ["float", "half", "bfloat16"])
def test_no_cast_takes_digits(cast):
    balancer = LossBalancer(WEIGHTS)
    gradient_handed_on(balancer, make, draw(4, 7))
    before = {k: v.clone() for k, v in balancer.state_dict().items()}
    getattr(nn.ModuleDict({"b": balancer}), cast)()
    for key, value in balancer.state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])


def built_on_meta(weights=WEIGHTS):
    with torch.device("meta"):
        return LossBalancer(weights)


def test_a_state_is_assigned_to_what_was_built_on_meta():
    whole = LossBalancer(WEIGHTS)
    whole.set_weights({"adv": 9.0})
    gradient_handed_on(whole, make, draw(4, 7))
    for order in (WEIGHTS, dict(reversed(WEIGHTS.items()))):
        model = nn.ModuleDict({"b": built_on_meta(order)})
        state = nn.ModuleDict({"b": whole}).state_dict()
        model.load_state_dict({k: v.clone() for k, v in state.items()}, assign=True)
        assert not any(buffer.is_meta for buffer in model.buffers())
        assert model["b"].weights == {**WEIGHTS, "adv": 9.0}
        twin = copy.deepcopy(whole)
        for seed in range(2):
            got, expected = (
                gradient_handed_on(b, make, draw(4, 7, seed=seed)) for b in (model["b"], twin)
            )
            torch.testing.assert_close(got, expected, **CLOSE)


def test_a_state_that_is_not_finite_is_refused_and_nothing_is_written():
    balancer = LossBalancer(WEIGHTS)
    before = {name: value.clone() for name, value in balancer.state_dict().items()}
    state = {name: torch.full_like(value, torch.nan) for name, value in before.items()}
    with pytest.raises(InputError, match="`state`"):
        balancer.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in balancer.state_dict().items())
