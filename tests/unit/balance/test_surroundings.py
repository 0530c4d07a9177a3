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


# What `state_dict` gave before the first release: in a step of which one micro-batch is there.
SAVED = {
    "core.weights": [2.0, 4.0],
    "core.nonfinite": [0, 0],
    "core.zero": [0, 1],
    "core.draws": 0,
    "core.names_json": [float(byte) for byte in b'["l2", "adv"]'],
    "core.averages.sums": [8.60555127546399, 1.4142135623730951],
    "core.averages.items": [2.0, 2.0],
    "core.averages.parts": [1.0, 1.0],
    "core.averages.position": 1.0,
    "core.averages.spoiled": 0.0,
    "core.averages.steps.total": [3.766123775561495, 0.7071067811865476],
    "core.averages.steps.mass": [1.0, 1.0],
}
NEXT = [[0.2784850831254335, 0.32126790585568454], [0.36405072858593557, 0.4068335513161866]]


@pytest.mark.parametrize("names", [["l2", "adv"], ["adv", "l2"]])
def test_an_older_state_is_taken_and_goes_on_as_it_did(names):
    balancer = LossBalancer(dict.fromkeys(names, 1.0), accumulation_steps=2, ema_decay=0.5)
    saved = {
        k: torch.tensor(v, dtype=None if k in ("core.nonfinite", "core.zero", "core.draws")
                        else torch.float64) for k, v in SAVED.items()
    }  # fmt: skip
    assert balancer.state_dict().keys() == saved.keys()
    balancer.load_state_dict(saved)
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64).requires_grad_()
    balancer.backward({"l2": y.square().mean(), "adv": 0.25 * y.sum()}, y)
    torch.testing.assert_close(y.grad, torch.tensor(NEXT, dtype=torch.float64), **CLOSE)
    assert balancer.left_out["zero"]["adv"].item() == 1


@pytest.mark.parametrize(
    "wrong", [[255.0, 1.0], list(b"{}"), list(b"[1]"), [], 1e15, [1e300], [torch.nan]]
)
def test_names_that_are_none_are_refused(wrong):
    state = LossBalancer(WEIGHTS).state_dict()
    state["core.names_json"] = torch.tensor(wrong)
    message = r"`names_json`. Found a tensor that does not decode to names.*Remedy"
    with pytest.raises(InputError, match=message):
        LossBalancer(WEIGHTS).load_state_dict(state)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float64])
def test_names_saved_in_another_type_or_rounded_are_taken(dtype):
    state = LossBalancer(WEIGHTS).state_dict()
    state["core.names_json"] = state["core.names_json"].to(dtype)
    if dtype == torch.float64:
        state["core.names_json"] *= 1 - 1e-9
    other = LossBalancer(dict(reversed(WEIGHTS.items())))
    other.load_state_dict(state)
    assert other.weights == WEIGHTS


class Triple(nn.Module):
    """An aggregator that is a module, as TorchJD's are."""

    def forward(self, matrix):
        return 3 * matrix.sum(0)


class Scale(nn.Module):
    """A gradient scaler that is a module."""

    def scale(self, x):
        return 1024 * x


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("combine", Triple()),
        ("combine", None),
        ("aggregator", Triple()),
        ("aggregator", torch.nanmean),
        ("weights", nn.ParameterDict({"l1": nn.Parameter(torch.ones(()))})),
        ("monitor", nn.Linear(1, 1)),
        ("grad_scale", nn.Linear(1, 1)),
        ("process_group", nn.Linear(1, 1)),
    ],
)
@pytest.mark.parametrize("combine", [None, Triple()])
def test_modules_are_refused_as_anything_else(name, value, combine):
    balancer = LossBalancer(WEIGHTS, combine=combine)
    before, members = gradient_handed_on(balancer, make, draw(4, 7)), list(balancer._modules)
    with pytest.raises(InputError, match="combine" if name == "aggregator" else name):
        setattr(balancer, name, value)
    assert list(balancer._modules) == members
    torch.testing.assert_close(gradient_handed_on(balancer, make, draw(4, 7)), before, **CLOSE)
    assert balancer.combine is combine


def test_a_scaler_that_is_a_module_is_heard_and_stays_outside():
    later, first = LossBalancer(WEIGHTS), LossBalancer(WEIGHTS, grad_scale=Scale())
    later.grad_scale = Scale()
    plain = gradient_handed_on(LossBalancer(WEIGHTS), make, draw(4, 7))
    for balancer in (later, first):
        loud = lambda ys: {k: 1024 * v for k, v in make(ys).items()}  # noqa: E731
        assert torch.equal(gradient_handed_on(balancer, loud, draw(4, 7)), 1024 * plain)
        assert isinstance(balancer.grad_scale, Scale)
        assert balancer.state_dict().keys() == LossBalancer(WEIGHTS).state_dict().keys()
        balancer.grad_scale = None
        assert balancer.grad_scale is None


def test_a_copy_asks_the_same_scaler():
    scaler = GradScaler("cpu", init_scale=4.0)
    balancer = LossBalancer(WEIGHTS, grad_scale=scaler)
    twin = copy.deepcopy(nn.ModuleDict({"b": balancer}))["b"]
    assert twin.grad_scale is balancer.grad_scale is scaler
    twin.grad_scale = 2.0
    assert balancer.grad_scale is scaler


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


def test_losses_that_are_new_have_their_own_weights_there_too():
    whole = LossBalancer(WEIGHTS)
    gradient_handed_on(whole, make, draw(4, 7))
    balancer = built_on_meta({"l1": 5.0, "new": 7.0})
    balancer.load_state_dict(whole.state_dict(), strict=False, assign=True)
    assert balancer.weights == {"l1": 1.0, "new": 7.0}
    assert balancer.core.averages.steps.mass.tolist() == [1.0, 0.0]


def test_without_assigning_a_state_needs_a_place():
    with pytest.raises(InputError, match=r"`meta`.*Remedy: `to_empty\(device=...\)`.*assign=True"):
        built_on_meta().load_state_dict(LossBalancer(WEIGHTS).state_dict())


def test_metrics_end_with_the_life_they_were_of():
    model = inside_of_a_model()
    state = model.state_dict()
    for load in (model.load_state_dict, None):
        gradient_handed_on(model["balancer"], make, draw(4, 7))
        assert model["balancer"].metrics
        if load is None:
            model["balancer"].load_state_dict(LossBalancer(WEIGHTS).state_dict())
        else:
            load(state)
        assert model["balancer"].metrics == {}


def test_a_loose_load_does_not_make_later_ones_loose():
    other = LossBalancer({"x": 1.0})
    balancer = LossBalancer(WEIGHTS)
    balancer.load_state_dict(other.state_dict(), strict=False)
    with pytest.raises(InputError, match="Expected the state of losses"):
        nn.ModuleDict({"b": balancer}).load_state_dict(nn.ModuleDict({"b": other}).state_dict())
