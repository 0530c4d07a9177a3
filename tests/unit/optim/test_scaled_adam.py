"""ScaledAdam equals its literal equations, both recipes."""

import pytest
import torch

from steadygrad.optim import ScaledAdam, clipping, scaled_adam, scaled_adam_rule
from tests.covering import covering
from tests.reference import scaled_adam as reference
from tests.unit.optim.reference_runs import MODES, deviation

OPTIONS = {
    "default": {},
    "fast": {"lr": 0.2, "betas": (0.5, 0.9)},
    "no-memory": {"betas": (0.0, 0.0)},
    "every-step": {"size_update_period": 1},
    "rarely": {"size_update_period": 7, "scalar_lr_scale": 1.0},
    "bounded": {"param_max_rms": 0.2, "param_min_rms": 0.05, "scalar_max": 0.5, "lr": 0.1},
    "uphill": {"maximize": True},
}
CLIPPED = {
    "often": {"clipping_scale": 1.1, "clipping_update_period": 5},
    "early": {"clipping_scale": 0.7, "clipping_update_period": 30},
    "late": {"clipping_scale": 0.5, "clipping_update_period": 50},
    "uphill": {"clipping_scale": 0.5, "clipping_update_period": 6, "maximize": True},
}
RECIPES = ["zipformer", "stateless7"]
recipes = pytest.mark.parametrize("recipe", RECIPES)


class Exact(ScaledAdam):
    """With its state in float64, which the current recipe keeps in float32."""

    def _state_dtype(self, parameter, group):
        return parameter.dtype


def difference(options, recipe, mode, make=Exact, **kwargs):
    options = {**options, "recipe": recipe}
    return max(
        deviation(
            lambda params: make(params, **options, **mode),
            lambda: reference.ScaledAdam(**options),
            seed=seed,
            **kwargs,
        )
        for seed in range(2)
    )


@pytest.mark.few(8)
@covering(options=OPTIONS, recipe=RECIPES, mode=MODES)
def test_equals_the_reference(options, recipe, mode):
    # Float64 on both sides; 60 steps of rounding in another order.
    assert difference(options, recipe, mode) < 1e-12


@covering(options=CLIPPED, recipe=RECIPES, mode=MODES)
def test_clips_as_the_reference(options, recipe, mode):
    # Norms and thresholds are float32, as the originals keep them.
    assert difference(options, recipe, mode) < 1e-6


@pytest.mark.parametrize("options", CLIPPED.values(), ids=CLIPPED)
def test_the_clipped_runs_are_clipped(options):
    """A guard on the tests above: without clipping they end elsewhere."""
    plain = {k: v for k, v in options.items() if "clipping" not in k}
    for recipe in ("zipformer", "stateless7"):
        off = deviation(
            lambda params, recipe=recipe: Exact(params, **options, recipe=recipe),
            lambda recipe=recipe: reference.ScaledAdam(**plain, recipe=recipe),
        )
        assert off > 1e-4


@recipes
def test_follows_a_changing_learning_rate(recipe):
    def before(step, optimizer, reference):
        optimizer.param_groups[0]["lr"] = reference.lr = 0.1 / (1 + step)

    assert difference({}, recipe, MODES["fused"], before=before) < 1e-12


@covering(recipe=RECIPES, mode=MODES)
def test_a_learning_rate_in_float32_is_not_rounded_again(recipe, mode):
    """Its product with a factor is taken in the weights' type."""

    def before(step, optimizer, reference):
        lr = torch.tensor(0.03)
        optimizer.param_groups[0]["lr"], reference.lr = lr, lr.item()

    assert difference({}, recipe, mode, before=before) < 1e-12


def test_its_own_state_is_float32():
    # Rounding of a float32 state, 60 steps of it.
    assert 1e-12 < difference({}, "zipformer", MODES["fused"], make=ScaledAdam) < 1e-5


@recipes
def test_the_momentum_goes_on_without_a_gradient(recipe):
    p = torch.full((3, 2), 0.5, requires_grad=True)
    optimizer = ScaledAdam([p], recipe=recipe)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before, p.grad = p.detach().clone(), None
    optimizer.step()
    assert (p < before).all()


def test_a_groups_norms_are_its_own():
    params = [torch.full((4,), 0.5, requires_grad=True) for _ in range(2)]
    optimizer = ScaledAdam(
        [{"params": [p]} for p in params], clipping_scale=2.0, clipping_update_period=4
    )
    for step in range(6):
        for place, p in enumerate(params):
            p.grad = torch.full((4,), 100.0 if step == 5 and place else 1.0)
        optimizer.step()
    assert [int(optimizer.state[p]["num_clipped"]) for p in params] == [0, 1]
    quiet, loud = (optimizer.state[p]["model_norms"] for p in params)
    assert loud.max() > 50 * quiet.max()


def test_a_thawed_parameter_does_not_turn_the_clipping_record_back():
    late = torch.ones(3, 2).requires_grad_(False)
    early = torch.ones(3, 2, requires_grad=True)
    optimizer = ScaledAdam([late, early], clipping_scale=2.0, clipping_update_period=5)
    for step in range(8):
        late.requires_grad_(step == 7)
        for p in (late, early) if step == 7 else (early,):
            p.grad = torch.full((3, 2), float(step + 1))
        before = optimizer.state[early]["model_norms"].clone()
        optimizer.step()
    assert optimizer.state[late]["step"] == 1
    changed = before != optimizer.state[early]["model_norms"]
    assert changed.tolist() == [place == 7 % 5 for place in range(5)]


@recipes
@pytest.mark.parametrize("period", [1, 3])
def test_a_host_that_does_not_look_ahead_takes_the_same_steps(recipe, period, monkeypatch):
    options = {"clipping_scale": 1.1, "clipping_update_period": 50, "size_update_period": period}

    def trained():
        draw = torch.Generator().manual_seed(0)
        params = [torch.randn(n, generator=draw).requires_grad_() for n in (1, 5, 40)]
        optimizer = ScaledAdam(params, recipe=recipe, fused=True, **options)
        for step in range(60):
            for p in params:
                scale = torch.inf if step == 30 else step % 7
                p.grad = scale * torch.randn(p.shape, generator=draw)
            optimizer.step()
        return [*params, *(s for p in params for s in optimizer.state[p].values())]

    expected = trained()
    # As on an accelerator: every flag may hold, and masks alone decide.
    for module in (clipping, scaled_adam, scaled_adam_rule):
        monkeypatch.setattr(module, "may_hold", lambda flags: True)
    for a, b in zip(trained(), expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("recipe", "expected"), [("zipformer", 10.0), ("stateless7", 10.3)])
def test_when_a_number_is_bounded(recipe, expected, mode):
    """After its step now; before it in 2022."""
    p = torch.nn.Parameter(torch.tensor(20.0))
    p.grad = torch.tensor(-1.0)
    ScaledAdam([p], lr=30.0, recipe=recipe, **mode).step()
    assert p.item() == pytest.approx(expected, rel=1e-6)
