"""Compiled loops write to no memory that is not theirs, whatever lies where it lay before."""

import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam, loops
from tests.contracts.problems import assert_rounded_alike
from tests.rounding import assert_alike

MAKERS = {
    "lans": LANS,
    "lamb": lambda p, **k: LAMB(p, max_grad_norm=1.0, **k),
    "scaled_adam": lambda p, **k: ScaledAdam(p, clipping_scale=2.0, **k),
}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
both_modes = pytest.mark.parametrize("mode", ["fused", "foreach"])


@pytest.fixture(autouse=True)
def _warnings_anew(monkeypatch):
    monkeypatch.setattr(loops, "_WARNED", set())


def start(make, shape=(8, 8), **mode):
    p = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return p, make([p], **mode)


def begun(make, mode):
    """A first step by calls, then another mode: what goes by calls again is equal to the bit."""
    p, optimizer = start(make, foreach=True)
    step(p, optimizer, 0)
    optimizer.param_groups[0].update({"foreach": None, "fused": None, mode: True})
    return p, optimizer


def step(p, optimizer, seed, gradient=None):
    drawn = torch.randn(p.shape, generator=torch.Generator().manual_seed(seed))
    p.grad = drawn if gradient is None else gradient(drawn)
    optimizer.step()


@every_optimizer
def test_rows_that_were_cut_off_are_left_alone(make):
    p, optimizer = start(make, fused=True)
    step(p, optimizer, 0)
    whole, p.grad = p.data, None
    rest = whole[4:].clone()
    p.data = p.data[:4]
    # The state is still of eight rows.
    with pytest.raises(InputError, match=r"shape.*\(4, 8\).*\(8, 8\)"):
        step(p, optimizer, 1)
    assert torch.equal(whole[4:], rest)


@every_optimizer
def test_an_old_gradient_of_fewer_rows_is_refused(make):
    p, optimizer = start(make, shape=(4, 8), fused=True)
    p.grad = torch.ones(4, 8)
    p.data = torch.ones(8, 8)
    optimizer = make([p], fused=True)
    with pytest.raises(InputError, match=r"shape \(4, 8\) for \(8, 8\).*Remedy"):
        optimizer.step()
    assert torch.equal(p.detach(), torch.ones(8, 8))


@every_optimizer
def test_another_order_at_the_same_address_is_noticed(make):
    found = {}
    for mode in ("fused", "foreach"):
        p, optimizer = start(make, **{mode: True})
        step(p, optimizer, 0)
        p.data = p.data.t()
        with pytest.warns() if mode == "fused" else nullcontext():
            step(p, optimizer, 1)
        found[mode] = p.detach().clone()
    assert_alike([("weight", found["fused"])], [("weight", found["foreach"])])


@every_optimizer
def test_a_state_of_another_type_goes_by_calls(make):
    outcomes = []
    for mode in ("fused", "foreach"):
        p, optimizer = begun(make, mode)
        state = optimizer.state[p]
        state["exp_avg_sq"] = state["exp_avg_sq"].bfloat16()
        with pytest.warns() if mode == "fused" else nullcontext():
            try:
                step(p, optimizer, 1)
            except RuntimeError as error:
                outcomes.append(str(error))
                continue
        outcomes.append(p.detach().clone())
    ours, theirs = outcomes
    assert torch.equal(ours, theirs) if isinstance(ours, torch.Tensor) else ours == theirs


@every_optimizer
def test_a_state_whose_memory_was_replaced_by_less(make):
    p, optimizer = start(make, fused=True)
    step(p, optimizer, 0)
    state = optimizer.state[p]["exp_avg_sq"]
    whole = state.data
    state.data = whole[:4]
    rest = whole[4:].clone()
    with pytest.raises(InputError, match=r"shape.*`exp_avg_sq` of \(4, 8\)"):
        step(p, optimizer, 1)
    assert torch.equal(whole[4:], rest)


@every_optimizer
def test_a_wrapped_gradient_is_no_zero(make):
    found = {}
    for mode in ("fused", "foreach"):
        p, optimizer = begun(make, mode)
        before = p.detach().clone()
        with pytest.warns() if mode == "fused" else nullcontext():
            step(p, optimizer, 1, gradient=lambda g: TwoTensor(g, g.clone()))
        found[mode] = p.detach().clone()
        assert (found[mode] - before).abs().max() > 1e-5
    assert torch.equal(found["fused"], found["foreach"])


@every_optimizer
def test_a_wrapped_gradient_is_noticed_by_loops_that_have_begun(make):
    p, optimizer = start(make, fused=True)
    other, by_calls = start(make, foreach=True)
    for number in range(3):
        step(p, optimizer, number)
        step(other, by_calls, number)
    before = p.detach().clone()
    with pytest.warns(UserWarning, match="its gradient or a state"):
        step(p, optimizer, 3, gradient=lambda g: TwoTensor(g, g.clone()))
    step(other, by_calls, 3, gradient=lambda g: TwoTensor(g, g.clone()))
    assert (p.detach() - before).abs().max() > 1e-5
    assert_rounded_alike(optimizer, by_calls)


@every_optimizer
@both_modes
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_counts_are_float32_whatever_the_default_is(make, mode, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        p = torch.ones(8, 8, dtype=torch.float32).requires_grad_()
        optimizer = make([p], **{mode: True})
        for _ in range(5):
            p.grad = torch.ones(8, 8, dtype=torch.float32)
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    state = optimizer.state[p]
    counts = {state[n].dtype for n in ("step", "skipped", "num_clipped") if n in state}
    assert counts == {torch.float32}
    assert state["step"].item() == 5


@every_optimizer
@both_modes
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_a_count_that_was_saved_in_another_type(make, mode, dtype):
    p, optimizer = start(make, **{mode: True})
    for seed in range(3):
        step(p, optimizer, seed)
    saved = optimizer.state_dict()
    saved["state"][0]["step"] = saved["state"][0]["step"].to(dtype)
    optimizer.load_state_dict(saved)
    step(p, optimizer, 3)
    assert optimizer.state[p]["step"].dtype is torch.float32
    assert optimizer.state[p]["step"].item() == 4


@every_optimizer
def test_a_count_of_another_type_in_the_state(make):
    found = []
    for mode in ("fused", "foreach"):
        p, optimizer = start(make, **{mode: True})
        step(p, optimizer, 0)
        optimizer.state[p]["step"] = optimizer.state[p]["step"].double()
        step(p, optimizer, 1)
        assert optimizer.state[p]["step"].item() == 2
        found.append(optimizer)
    assert_rounded_alike(*found)


@every_optimizer
def test_another_default_device(make):
    found = []
    for device in ("meta", "cpu"):
        p, optimizer = start(make, fused=True)
        gradients = [
            torch.randn(8, 8, generator=torch.Generator().manual_seed(i)) for i in range(9)
        ]
        with torch.device(device):
            for gradient in gradients:
                p.grad = gradient
                optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(*found)


@both_modes
@pytest.mark.parametrize("option", ["size_update_period", "clipping_update_period"])
@pytest.mark.parametrize("value", [2, 8])
def test_a_period_cannot_change(mode, option, value):
    p, optimizer = start(MAKERS["scaled_adam"], **{mode: True})
    step(p, optimizer, 0)
    before = p.detach().clone()
    optimizer.param_groups[0][option] = value
    with pytest.raises(InputError, match=f"`{option}`.*Remedy: a new optimizer"):
        step(p, optimizer, 1)
    assert torch.equal(p.detach(), before)
    assert optimizer.state[p]["step"].item() == 1


@both_modes
@pytest.mark.parametrize(("at", "skipped"), [(5, 0), (7, 1)], ids=["between", "size step"])
def test_an_inner_product_that_overflows_skips_a_size_step(mode, at, skipped):
    """It is used at a size step only; taken along by another step it counts as zero."""
    p = torch.full((100,), 1e9).requires_grad_()
    optimizer = ScaledAdam([p], **{mode: True})
    for number in range(12):
        p.grad = torch.full((100,), 0.5e9 if number == at else 1.0)
        optimizer.step()
        if number == 5 and at == 5:
            # 5e19 squared is past float32's range, though the gradient's own squares are not.
            assert optimizer.state[p]["scale_grads"][1] == 0
    assert optimizer.skipped.item() == skipped
    assert optimizer.state[p]["scale_exp_avg_sq"].isfinite()


def test_weights_that_grew_since_leave_no_infinity_behind():
    """Their norm is taken at size steps only: an inner product may come late that is infinite."""
    p = torch.ones(100).requires_grad_()
    optimizer = ScaledAdam([p], fused=True)
    for number in range(12):
        p.data.fill_(1e25 if number == 5 else 1.0)
        p.grad = torch.full((100,), 1e3 if number == 5 else 1.0)
        optimizer.step()
    assert optimizer.state[p]["scale_exp_avg_sq"].isfinite()
    assert optimizer.state[p]["scale_grads"].isfinite().all()


def test_a_norm_near_the_end_of_the_range_is_no_warning():
    p = torch.ones(100).requires_grad_()
    optimizer = ScaledAdam([p], clipping_scale=2.0, clipping_update_period=4, fused=True)
    # Of both signs, so that inner products with the weights stay small.
    large = torch.tensor([3e17, -3e17]).repeat(50)
    for number in range(12):
        p.grad = torch.zeros(100) if number == 11 else large
        optimizer.step()
    # Its threshold over the least norm there can be is past float32's range.
    assert optimizer.state[p]["model_norm_threshold"].item() > 4e18
    assert optimizer.skipped.item() == 0
    assert p.isfinite().all()


@every_optimizer
@both_modes
def test_weights_that_were_let_go_are_free(make, mode):
    p, optimizer = start(make, **{mode: True})
    step(p, optimizer, 0)
    kept = weakref.ref(p.untyped_storage())
    p.grad = None
    p.data = torch.empty(0)
    assert kept() is None


@both_modes
@pytest.mark.parametrize("size", [1e25, 1e150])
def test_gradients_past_the_states_range_skip_the_step(mode, size):
    """Float64 weights, whose state the current recipe keeps in float32."""
    p = torch.ones(10, dtype=torch.float64).requires_grad_()
    optimizer = ScaledAdam([p], **{mode: True})
    for number in range(6):
        p.grad = torch.full((10,), size if number == 2 else 1.0, dtype=torch.float64)
        optimizer.step()
    assert optimizer.skipped.item() == 1
    assert p.isfinite().all()
    assert optimizer.state[p]["exp_avg_sq"].isfinite().all()


def transposed(x):
    return x.t().contiguous().t()


LAYOUTS = {"half": torch.Tensor.half, "double": torch.Tensor.double, "order": transposed}
PLACES = {
    "lans": ["exp_avg", "exp_avg_sq"],
    "lamb": ["exp_avg", "exp_avg_sq"],
    "scaled_adam": ["delta", "exp_avg_sq"],
}


@pytest.mark.few(36)
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("change", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("place", [0, 1, "master_weight", "step"])
@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
def test_memory_of_states_in_another_type_or_order(make, dtype, change, place, request):
    """Its object stays the same; loops must not take it for what it was."""
    name = place
    if isinstance(place, int):
        name = PLACES[request.node.callspec.id.split("-")[-1]][place]

    def trained(mode):
        draw = torch.Generator().manual_seed(0)
        p = torch.randn(6, 6, generator=draw).to(dtype).requires_grad_()
        optimizer = make([p], **{mode: True})
        for number in range(6):
            state = (
                optimizer.state[p].get(name, torch.zeros(())) if number == 2 else torch.zeros(())
            )
            if state.ndim == 2 or change is not transposed:
                state.data = change(state.data)
            p.grad = torch.randn(6, 6, generator=draw).to(dtype)
            optimizer.step()
        return [p.detach().float(), *(v.float() for v in optimizer.state[p].values())]

    try:
        expected = trained("foreach")
    except RuntimeError:
        # Torch's calls do not mix these types; then nor does what stands in for them.
        with pytest.raises(RuntimeError, match="type"):
            trained("fused")
        return
    for a, b in zip(trained("fused"), expected, strict=True):
        # Rounding of float32, and of what became float16; a wrong order or type is off by 1.
        torch.testing.assert_close(a, b, rtol=4e-3, atol=4e-3)


@every_optimizer
def test_all_of_a_parameter_cut_off(make):
    """Old loops would read megabytes past the end of the new gradient."""
    found = []
    for mode in ("fused", "foreach"):
        p, optimizer = start(make, shape=(4_000_000,), **{mode: True})
        for number in range(2):
            step(p, optimizer, number)
        p.grad, p.data = None, p.data[:1000].clone()
        for name, value in optimizer.state[p].items():
            if value.numel() == 4_000_000:
                optimizer.state[p][name] = value[:1000].clone()
        step(p, optimizer, 2)
        found.append([("weight", p)])
    assert_alike(*found)


def test_a_master_that_was_taken_out_of_the_state_is_left_alone():
    for count in range(1, 6):
        draw = torch.Generator().manual_seed(0)
        p = torch.randn(100, generator=draw).bfloat16().requires_grad_()
        optimizer = ScaledAdam([p], fused=True)
        for _ in range(count):
            p.grad = torch.ones_like(p)
            optimizer.step()
        kept, other = optimizer.state[p]["master_weight"], torch.randn(100, generator=draw)
        before = kept.clone()
        optimizer.state[p]["master_weight"] = other.clone()
        p.data.copy_(other)
        optimizer.step()
        assert torch.equal(kept, before)
        assert not torch.equal(optimizer.state[p]["master_weight"], other)


@both_modes
def test_weights_that_are_not_finite_skip_steps_until_they_are_mended(mode):
    p, q = (torch.ones(9, 9, requires_grad=True) for _ in range(2))
    optimizer, moved = ScaledAdam([p, q], **{mode: True}), []
    for number in range(12):
        if number == 5:
            kept = p.detach().clone()
            p.data[0, 0] = torch.nan
        if number == 9:
            p.data.copy_(kept)
        for x in (p, q):
            x.grad = torch.randn(9, 9, generator=torch.Generator().manual_seed(number))
        before = q.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(q, before))
    # It is learned at the next size step, the eighth, in every mode.
    assert moved == [True] * 7 + [False] * 2 + [True] * 3
    assert optimizer.skipped == 2
    assert all(t.isfinite().all() for t in list(optimizer.state[p].values())[:6])
