"""Diagnostics name the parameter that is at fault."""

import pytest
import torch
from adan import Adan

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same, give_gradients, parameters, snapshot

MAKERS = {
    "lans": LANS,
    "lamb": lambda p: LAMB(p, max_grad_norm=1.0),
    "clipped": lambda p: ScaledAdam(p, clipping_scale=2.0, clipping_update_period=10),
    # With a report on gradients alone.
    "adan": Adan,
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def trained(make, count):
    values = dict(zip(("wide", "bias", "gain"), parameters(), strict=False))
    optimizer = make(values.items())
    steps(optimizer, values, count)
    return values, optimizer


def steps(optimizer, values, count, factor=1.0):
    for step in range(count):
        give_gradients(values.values(), step, none=False)
        for p in values.values():
            p.grad *= factor
        optimizer.step()


@every_optimizer
def test_the_numbers_of_an_ordinary_step_whatever_the_loss_scale(make):
    values, optimizer = trained(make, 20)
    before = snapshot(optimizer, values.values())
    (report,) = optimizer.diagnostics()
    square = sum(float(p.grad.square().sum()) for p in values.values())
    # float32 sums.
    assert report["gradient_norm"] == pytest.approx(square**0.5, rel=1e-5)
    assert report["skipped"] == 0
    assert report["not_finite"] == report["too_large"] == []
    for p in values.values():
        p.grad *= 2.0**16
    assert optimizer.diagnostics(grad_scale=2.0**16) == [report]  # a power of two: to the bit
    with pytest.raises(InputError, match="grad_scale"):
        optimizer.diagnostics(grad_scale=0)
    optimizer.zero_grad()
    assert optimizer.diagnostics()[0]["gradient_norm"] == 0
    assert_same(before, snapshot(optimizer, values.values()))


@every_optimizer
def test_tells_what_is_too_large_from_what_is_not_finite(make):
    values, optimizer = trained(make, 2)
    values["wide"].grad[0, 0] = 1e30
    values["bias"].grad[0] = torch.nan
    optimizer.step()
    (report,) = optimizer.diagnostics()
    assert (report["not_finite"], report["too_large"]) == (["bias"], ["wide"])
    assert report["skipped"] == 1


def test_trust_ratios_are_those_of_the_rule_and_the_largest_come_first():
    values, optimizer = trained(lambda p: LANS(p, weight_decay=0.1), 5)
    (report,), expected = optimizer.diagnostics(), {"trust_ratio": {}, "gradient_trust_ratio": {}}
    for name, p in values.items():
        state = optimizer.state[p]
        d = (state["exp_avg_sq"] / (1 - 0.999**5)).sqrt() + 1e-6
        momentum = state["exp_avg"] / (1 - 0.9**5) / d + 0.1 * p.detach()
        gradient = p.grad / p.grad.norm() / d + 0.1 * p.detach()
        for kind, direction in zip(expected, (momentum, gradient), strict=True):
            # float32 arithmetic in another order.
            ratio = float(p.detach().norm() / direction.norm())
            expected[kind][name] = pytest.approx(ratio, rel=1e-4)
    for kind, ratios in expected.items():
        assert report[kind] == ratios
        assert [*report[kind].values()] == sorted(report[kind].values(), reverse=True)
    (short,) = optimizer.diagnostics(top=1)
    assert [*short["trust_ratio"]] == [next(iter(report["trust_ratio"]))]


def test_scaled_adam_dominance_quartiles_and_clipped_share():
    values, optimizer = trained(MAKERS["clipped"], 31)
    for step in range(4):  # steps 31 to 34: two of five since the threshold of step 30 are clipped
        steps(optimizer, values, 1, factor=1000.0 if step < 2 else 1.0)
    (report,) = optimizer.diagnostics()
    state = optimizer.state[values["wide"]]
    norms = state["model_norms"].sort().values
    assert report["quartiles"][0] == pytest.approx(float(norms[0]))
    assert report["quartiles"][4] == pytest.approx(float(norms[-1]))
    assert report["threshold"] == float(state["model_norm_threshold"])
    assert report["clipped"] == pytest.approx(2 / 5)
    sizes = {name: float(optimizer.state[values[name]]["param_rms"]) for name in ("wide", "bias")}
    assert report["rms"] == pytest.approx(sizes)
    scales = {**sizes, "gain": 0.1}
    terms = {n: float((p.grad * scales[n]).square().sum()) for n, p in values.items()}
    expected = {name: term / sum(terms.values()) for name, term in terms.items()}
    assert report["dominance"] == pytest.approx(expected, rel=1e-5)


def test_what_a_report_in_inference_mode_makes_a_step_can_write_to():
    p = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.bfloat16))
    optimizer, p.grad = LANS([p], master_weights=False), torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["master_weights"] = True
    with torch.inference_mode():
        optimizer.diagnostics()
    assert not optimizer.state[p]["master_weight"].is_inference()
