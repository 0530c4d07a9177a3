"""A scaler for each network: a pass of another's loss is none of a scaler's business."""

import importlib
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad.balance import LossBalancer
from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.training import (
    SCALES,
    Poison,
    assert_equal,
    end_step,
    loss_on,
    make,
    take_step,
    unscaled_gradients,
    weights_of,
)

INF = float("inf")


@pytest.mark.parametrize(
    ("shape", "spoilt"), [("GAN", "critic"), ("GAN", "generator"), ("SAC", "actor")]
)
def test_weights_are_those_without_scaling_and_only_an_overflows_own_network_skips(
    shape, spoilt, monkeypatch
):
    monkeypatch.syspath_prepend(Path(__file__).parents[3] / "benchmarks")
    loops = importlib.import_module("two_scalers").LOOPS

    def trained(scaler):
        torch.manual_seed(0)
        return loops[shape](scaler, half=False, spoilt=spoilt, bad=2).run(6)

    plain, scaled = trained("none"), trained("by hand")
    assert scaled.taken == plain.taken
    skipped = {name: int(scaler.skipped) for name, scaler in scaled.scalers.items()}
    assert skipped == {name: int(name == spoilt) for name in skipped}
    for name, net in plain.nets.items():
        # To the bit: powers of two scale float32 without rounding.
        assert_equal(weights_of(scaled.nets[name]), weights_of(net))


CALLS = {
    "eager": lambda model: model,
    "checkpoint": lambda model: partial(checkpoint, model, use_reentrant=False),
    "reentrant": lambda model: partial(checkpoint, model, use_reentrant=True),
    "compiled": lambda model: torch.compile(model, fullgraph=True, backend="aot_eager"),
}


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")
@pytest.mark.parametrize("whose", ["another scaler's", "unscaled"])
@pytest.mark.parametrize(
    "how", [*list(CALLS)[:3], pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_another_pass_is_neither_counted_nor_cleaned(how, whose):
    torch.compiler.reset()
    model, optimizer = make()
    scaler, poison = LayerwiseGradScaler(model, SCALES, growth_interval=1), Poison(model.b[0])
    other = LayerwiseGradScaler(nn.Linear(1, 1), {}, init_scale=4.0)
    call, poison.active = CALLS[how](model), False

    def passed(called, factor, backward):
        x = torch.ones(3, 4, requires_grad=True)
        backward(called(x).square().mean() * factor)
        return x.grad

    def others(loss):
        (other.scale(loss) if whose == "another scaler's" else loss).backward()

    own = partial(take_step, optimizer, scaler)
    scaler.measure()
    passed(call, 1.0, own)
    before, measured = scaler.get_scales(), scaler.measured
    twin, _ = make()
    twin.load_state_dict(model.state_dict())
    assert torch.equal(passed(call, 1.0, others), passed(twin, 1.0, others))
    assert not passed(call, INF, others).isfinite().any()
    passed(call, 1.0, own)
    assert scaler.skipped == 0
    assert scaler.get_scales() == {name: 2 * s if name else s for name, s in before.items()}
    assert torch.equal(scaler.measured.activations.sum(1), measured.activations.sum(1))
    # And its own passes are.
    if how != "compiled":
        poison.active = True
        passed(call, 1.0, own)
        assert scaler.culprits() == ["b"]
    assert passed(call, INF, own).isfinite().all()
    assert "" in scaler.culprits()


def test_another_scaler_s_loss_is_not_scaled_on_the_way():
    """Where the scales of both would be too much for the type."""
    model, _ = make(torch.float16)
    scaler = LayerwiseGradScaler(model, {"a": 2.0**20, "b": 2.0**20}, init_scale=1.0)
    other = LayerwiseGradScaler(nn.Linear(1, 1), {}, init_scale=2.0**10)
    scaler.scale(model(torch.ones(3, 4).half()).float().mean() * 2.0**-20).backward()
    x = torch.ones(3, 4, requires_grad=True, dtype=torch.float16)
    other.scale(model(x).float().mean()).backward()
    plain, y = make(torch.float16)[0], torch.ones(3, 4, requires_grad=True, dtype=torch.float16)
    (2.0**10 * plain(y).float().mean()).backward()
    assert torch.equal(x.grad, y.grad)


def test_a_gradient_that_is_handed_on_by_hand_is_unscaled_rightly():
    """The model's pass begins at its output: nothing in it tells of the scaled loss."""
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, init_scale=8.0)
    out = model(torch.ones(3, 4))
    cut = out.detach().requires_grad_()
    scaler.scale(cut.square().mean()).backward()
    out.backward(cut.grad)
    scaler.unscale_(optimizer)
    found = {name: p.grad for name, p in model.named_parameters()}
    loss = lambda model: model(torch.ones(3, 4)).square().mean()
    assert_equal(found, unscaled_gradients(make()[0], {}, loss))


def test_without_losses_of_its_own_as_on_a_pipelines_first_stage_all_passes_count():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    # And another scaler's passes are over.
    LayerwiseGradScaler(make()[0], {}).scale(torch.ones((), requires_grad=True)).backward()
    before = weights_of(model)
    out = model(torch.ones(3, 4))
    out.backward(torch.full_like(out, INF))
    end_step(optimizer, scaler)
    assert scaler.culprits() == [""]
    assert_equal(weights_of(model), before)


def test_what_came_before_its_first_loss_is_forgotten():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    (loss_on(model, 0) * INF).backward()
    take_step(optimizer, scaler, loss_on(model, 0))
    assert (scaler.culprits(), int(scaler.skipped)) == ([], 0)


def test_a_pass_that_raised_an_error_is_over():
    (model, _), (other, _) = make(), make()
    scaler, theirs = LayerwiseGradScaler(model, SCALES), LayerwiseGradScaler(other, SCALES)

    def unscaled():
        model.zero_grad()
        loss_on(model, 0).backward()
        return model.a.weight.grad

    scaler.scale(loss_on(model, 0)).backward()
    expected = unscaled()
    x = torch.ones(3, 4, requires_grad=True)
    x.register_hook(lambda gradient: [][0])
    with pytest.raises(IndexError):
        theirs.scale(other(x).mean()).backward()
    assert torch.equal(unscaled(), expected)
    with pytest.raises(IndexError):
        scaler.scale(model(x).mean()).backward()
    (loss_on(model, 0) * INF).backward()
    assert not scaler._table.nonfinite.any()


@pytest.mark.parametrize("passes", ["sum", "retained", "accumulated"])
def test_every_pass_of_an_own_loss_counts(passes):
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    good, bad = scaler.scale([loss_on(model, 0), loss_on(model, 1) * INF])
    if passes == "sum":
        (good + bad).backward()
    elif passes == "retained":
        bad.backward(retain_graph=True)
        bad.backward()
    else:
        bad.backward()
        good.backward()
    end_step(optimizer, scaler)
    assert (scaler.culprits(), int(scaler.skipped)) == ([""], 1)


def test_a_balanced_pass_is_the_scalers_own():
    """Its second part begins at the output, behind the scaled losses."""
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES, init_scale=8.0)
    balancer = LossBalancer({"square": 1, "absolute": 2}, grad_scale=scaler)
    Poison(model.b[0])
    out = model(torch.ones(3, 4))
    losses = {"square": out.square().mean(), "absolute": out.abs().mean()}
    balancer.backward({name: scaler.scale(loss) for name, loss in losses.items()}, out)
    end_step(optimizer, scaler)
    assert scaler.culprits() == ["b"]


@pytest.mark.parametrize(
    ("head", "inputs"), [(torch.sum, None), (lambda y: y.square().sum(), "a.weight")]
)
def test_a_second_derivative_is_refused(head, inputs):
    model, _ = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    x = torch.ones(3, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(head(model(x)), x, create_graph=True)
    penalty = scaler.scale((gradient.norm() - 1).square())
    with pytest.raises(ValueError, match="layer_scales"):
        penalty.backward(inputs=inputs and [model.get_parameter(inputs)])
