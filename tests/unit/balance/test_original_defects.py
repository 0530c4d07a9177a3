"""Audiocraft's own class: the same numbers, and how it fails where ours does not.

Runs where `pip install --no-deps audiocraft flashy` was done; see benchmarks/originals.py.
"""

import math
import warnings

import pytest
import torch
from benchmarks.originals import load_balancer
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
    make_model,
    same_y,
)

Original = load_balancer()
if Original is None:
    pytest.skip("audiocraft and flashy are not installed", allow_module_level=True)

TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


def handed_on(balancer, make_losses, y):
    source = y.detach().clone().requires_grad_()
    seen = source.view_as(source)
    effective = balancer.backward(make_losses(same_y(seen, balancer.weights)), seen)
    return source.grad, effective


@pytest.mark.parametrize("call", ["backward", "fork"])
@pytest.mark.parametrize("seed", [11, 12, 13])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"per_batch_item": False, "ema_decay": 0.9, "total_norm": 3.0},
        {"balance_grads": False},
        {"ema_decay": 1.0},
    ],
    ids=["default", "whole batch", "weighted", "mean"],
)
def test_fifty_steps_side_by_side(options, seed, call):
    ours, original = LossBalancer(WEIGHTS, **options), Original(WEIGHTS, monitor=True, **options)
    for step in range(50):
        y, target = draw(5, 3, 4, seed=1000 * seed + step), draw(5, 3, 4, seed=-step - seed)
        problem = lambda ys, t=target: losses_of(ys, t)  # noqa: E731
        expected, effective = handed_on(original, problem, y)
        if call == "backward":
            got, own_effective = handed_on(ours, problem, y)
            torch.testing.assert_close(own_effective, effective, rtol=1e-12, atol=1e-15)
        else:
            got = gradient_handed_on(ours, problem, y, call)
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-15)
        for name, value in original.metrics.items():
            assert ours.metrics[name].item() == pytest.approx(value, rel=1e-12)


def test_1_key_error():
    balancer, y = Original(WEIGHTS), draw(4, 7)
    handed_on(balancer, make, y)
    with pytest.raises(KeyError, match="adv"):
        handed_on(balancer, lambda ys: {k: v for k, v in make(ys).items() if k != "adv"}, y)


def test_2_nan_forever():
    balancer, y = Original(WEIGHTS), draw(4, 7)
    handed_on(balancer, lambda ys: {**make(ys), "l2": ys["l2"][0, 0] * math.nan}, y)
    assert handed_on(balancer, make, y)[0].isnan().all()


@pytest.mark.parametrize("factor", [65536.0, 1 / 8], ids=["3 loss scale", "4 accumulation"])
def test_factors_are_cancelled(factor):
    y = draw(4, 7)
    times = lambda ys: {k: factor * v for k, v in make(ys).items()}  # noqa: E731
    plain, scaled = handed_on(Original(WEIGHTS), make, y)[0], handed_on(Original(WEIGHTS), times, y)
    torch.testing.assert_close(scaled[0], plain, rtol=1e-6, atol=0)


def test_5_float16_raises():
    tiny = lambda ys: {"a": (ys["a"] * 2.0**-20).sum(), "b": (ys["b"] * 2.0**-3).sum()}  # noqa: E731
    with pytest.raises(RuntimeError, match="without overflow"):
        handed_on(Original({"a": 1, "b": 1}, total_norm=10.0), tiny, draw(4, 7).half())


def test_6_batch_size_matters():
    grads = []
    for copies in (1, 4):
        model = make_model()
        y, target = model(draw(6, 5).repeat(copies, 1)), draw(6, 7, seed=1).repeat(copies, 1)
        Original(WEIGHTS).backward(losses_of(same_y(y), target), y)
        grads.append(model[0].weight.grad)
    torch.testing.assert_close(grads[1], 4 * grads[0], rtol=1e-6, atol=0)


def test_7_norm_of_the_whole():
    got, _ = handed_on(Original({"a": 1}), lambda ys: {"a": ys["a"].sum()}, draw(5))
    torch.testing.assert_close(got, torch.full_like(got, 5**-0.5))


def test_8_effective_loss_of_a_zero_gradient():
    flat = lambda ys: {**make(ys), "l1": 0.0 * ys["l1"].sum() + 0.5}  # noqa: E731
    assert handed_on(Original(WEIGHTS), flat, draw(4, 7))[1] > 1e10


def test_9_heads_get_nothing_and_a_loss_apart_raises_without_a_name():
    head = nn.Linear(7, 1).double()
    y = draw(4, 7).requires_grad_()
    Original(WEIGHTS).backward({**make(same_y(y)), "adv": head(y).mean()}, y)
    assert head.weight.grad is None
    apart = draw(3).requires_grad_()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        Original(WEIGHTS).backward({**make(same_y(y)), "adv": apart.sum()}, y)


def test_10_ratios_are_those_before():
    balancer = Original(WEIGHTS, monitor=True)
    handed_on(balancer, make, draw(4, 7))
    assert balancer.metrics["ratio_adv"] < 0.01  # its share of what was handed on is 4/7
    assert set(balancer.metrics) == {f"ratio_{k}" for k in WEIGHTS}


def test_11_no_target_is_to_be_had():
    balancer = Original(WEIGHTS, monitor=True)
    handed_on(balancer, lambda ys: {k: v for k, v in make(ys).items() if k != "adv"}, draw(4, 7))
    # Its targets (1/3 and 2/3 here, and 4/3 for the loss that is not there) stay inside.
    assert not any("target" in key or "desired" in key for key in balancer.metrics)


def test_12_donated_buffers():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        head = nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 1)).double()
        compiled = torch.compile(head, backend="aot_eager")
        compiled(draw(4, 7).requires_grad_()).mean().backward()
        both = lambda ys: {"l1": make(ys)["l1"], "adv": compiled(ys["adv"]).mean()}  # noqa: E731
        with pytest.raises(RuntimeError, match="donated buffers"):
            handed_on(Original(WEIGHTS), both, draw(4, 7))


def test_13_reentrant_checkpoints():
    head = nn.Linear(7, 1).double()
    again = lambda ys: {"adv": checkpoint(head, ys["adv"], use_reentrant=True).mean()}  # noqa: E731
    with pytest.raises(RuntimeError, match="use_reentrant=True"):
        handed_on(Original(WEIGHTS), again, draw(4, 7))


def test_14_no_state_to_save():
    balancer = Original(WEIGHTS)
    assert not hasattr(balancer, "state_dict")
    y = draw(4, 7)
    handed_on(balancer, make, 100 * y)
    again = Original(WEIGHTS)
    same = torch.equal(handed_on(balancer, make, y)[0], handed_on(again, make, y)[0])
    assert not same
