"""Diagnostics name the parameter that is at fault."""

import pytest
import torch
from adan import Adan

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam

MAKERS = {
    "lans": LANS,
    "lamb": lambda p: LAMB(p, max_grad_norm=1.0),
    "scaled_adam": ScaledAdam,
    "clipped": lambda p: ScaledAdam(p, clipping_scale=2.0, clipping_update_period=10),
}
# With a report on gradients alone.
ALL = {**MAKERS, "adan": Adan}


def parameters():
    draw = torch.Generator().manual_seed(0)
    shapes = {"wide": (8, 4), "bias": (4,), "gain": ()}
    return {
        name: (torch.randn(shape, generator=draw) * 0.1 + 0.2).requires_grad_()
        for name, shape in shapes.items()
    }


def steps(optimizer, values, count, factor=1.0):
    draw = torch.Generator().manual_seed(1)
    for _ in range(count):
        for p in values.values():
            p.grad = torch.randn(p.shape, generator=draw) * factor
        optimizer.step()


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_the_numbers_of_an_ordinary_step(maker):
    values = parameters()
    optimizer = maker(values.items())
    steps(optimizer, values, 20)
    (report,) = optimizer.diagnostics()
    square = sum(float(p.grad.square().sum()) for p in values.values())
    # float32 sums.
    assert report["gradient_norm"] == pytest.approx(square**0.5, rel=1e-5)
    assert report["skipped"] == 0
    assert report["not_finite"] == report["too_large"] == []


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_loss_scale_changes_no_number(maker):
    plain, scaled = parameters(), parameters()
    ours, theirs = maker(plain.items()), maker(scaled.items())
    for values, optimizer in ((plain, ours), (scaled, theirs)):
        steps(optimizer, values, 12)
    for p in scaled.values():
        p.grad *= 2.0**16
    (expected,), (found,) = ours.diagnostics(), theirs.diagnostics(grad_scale=2.0**16)
    assert found == expected  # to the bit: the scale is a power of two
    with pytest.raises(InputError, match="grad_scale"):
        ours.diagnostics(grad_scale=0)


def test_the_clipped_share_after_the_first_parameter_is_thawed():
    late, early = torch.ones(3, 2), torch.ones(3, 2, requires_grad=True)
    optimizer = ScaledAdam([late, early], clipping_scale=0.5, clipping_update_period=5)
    for step in range(10):
        late.requires_grad_(step == 9)
        for p in (late, early) if step == 9 else (early,):
            p.grad = torch.full((3, 2), float(step + 1))
        optimizer.step()
    (report,) = optimizer.diagnostics()
    # The last threshold was taken at step 5, and steps 5 to 9 were above it.
    assert report["clipped"] == 1.0
    assert len(set(report["quartiles"])) == 5


@pytest.mark.parametrize("maker", ALL.values(), ids=ALL)
def test_names_the_gradient_that_is_not_finite(maker):
    values = parameters()
    optimizer = maker(values.items())
    steps(optimizer, values, 3)
    values["wide"].grad[0, 0] = torch.inf
    optimizer.step()
    (report,) = optimizer.diagnostics()
    assert report["not_finite"] == ["wide"]
    assert report["skipped"] == 1


@pytest.mark.parametrize("maker", ALL.values(), ids=ALL)
def test_changes_nothing_and_needs_no_gradient(maker):
    values = parameters()
    optimizer = maker(values.items())
    steps(optimizer, values, 3)
    for p in values.values():
        p.grad = None
    before = [t.clone() for s in optimizer.state.values() for t in s.values()]
    (report,) = optimizer.diagnostics()
    after = [t for s in optimizer.state.values() for t in s.values()]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert report["gradient_norm"] == 0


def test_lans_trust_ratios_are_those_of_the_rule():
    values = parameters()
    optimizer = LANS(values.items(), weight_decay=0.1)
    steps(optimizer, values, 5)
    (report,) = optimizer.diagnostics()
    for name, p in values.items():
        state = optimizer.state[p]
        g = p.grad / p.grad.norm()
        d = (state["exp_avg_sq"] / (1 - 0.999**5)).sqrt() + 1e-6
        momentum = state["exp_avg"] / (1 - 0.9**5) / d + 0.1 * p.detach()
        gradient = g / d + 0.1 * p.detach()
        norm = p.detach().norm()
        # float32 arithmetic in another order.
        assert report["trust_ratio"][name] == pytest.approx(float(norm / momentum.norm()), rel=1e-4)
        assert report["gradient_trust_ratio"][name] == pytest.approx(
            float(norm / gradient.norm()), rel=1e-4
        )


def test_scaled_adam_dominance_quartiles_and_clipped_share():
    values = parameters()
    optimizer = ScaledAdam(values.items(), clipping_scale=2.0, clipping_update_period=10)
    steps(optimizer, values, 31)
    for _ in range(4):  # steps 31 to 34: two of five since the threshold of step 30 are clipped
        steps(optimizer, values, 1, factor=1000.0 if _ < 2 else 1.0)
    (report,) = optimizer.diagnostics()
    state = optimizer.state[values["wide"]]
    norms = state["model_norms"].sort().values
    assert report["quartiles"][0] == pytest.approx(float(norms[0]))
    assert report["quartiles"][4] == pytest.approx(float(norms[-1]))
    assert report["threshold"] == float(state["model_norm_threshold"])
    assert report["clipped"] == pytest.approx(2 / 5)
    rms = float(state["param_rms"])
    wide = rms**2 * float(values["wide"].grad.square().sum())
    bias_rms = float(optimizer.state[values["bias"]]["param_rms"])
    bias = bias_rms**2 * float(values["bias"].grad.square().sum())
    gain = 0.1**2 * float(values["gain"].grad.square())
    assert report["dominance"]["wide"] == pytest.approx(wide / (wide + bias + gain), rel=1e-5)
    assert report["rms"] == {
        name: pytest.approx(float(optimizer.state[values[name]]["param_rms"]))
        for name in ("wide", "bias")
    }


def test_unnamed_parameters_and_the_length_of_lists():
    draw = torch.Generator().manual_seed(0)
    values = {i: torch.randn(3, generator=draw).requires_grad_() for i in range(5)}
    optimizer = LANS(values.values())
    steps(optimizer, values, 2)
    (report,) = optimizer.diagnostics(top=2)
    assert len(report["trust_ratio"]) == 2
    assert set(report["trust_ratio"]) <= {f"group 0, {i}" for i in range(5)}


@pytest.mark.parametrize("maker", ALL.values(), ids=ALL)
def test_tells_what_is_too_large_from_what_is_not_finite(maker):
    values = parameters()
    optimizer = maker(values.items())
    steps(optimizer, values, 2)
    values["wide"].grad[0, 0] = 1e30
    values["bias"].grad[0] = torch.nan
    optimizer.step()
    (report,) = optimizer.diagnostics()
    assert report["not_finite"] == ["bias"]
    assert report["too_large"] == ["wide"]
