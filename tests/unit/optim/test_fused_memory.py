"""Compiled loops write to no memory that is not theirs, whatever lies where it lay before."""

from contextlib import nullcontext

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from steadygrad._checks import InputError
from steadygrad.optim import LANS, ScaledAdam, loops
from tests.contracts.problems import assert_rounded_alike
from tests.covering import covering
from tests.rounding import assert_alike

both_modes = pytest.mark.parametrize("mode", ["fused", "foreach"])


@pytest.fixture(autouse=True)
def _warnings_anew(monkeypatch):
    monkeypatch.setattr(loops, "_WARNED", set())


def start(make=LANS, **mode):
    p = torch.randn(8, 8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    return p, make([p], **mode)


def step(p, optimizer, seed, gradient=lambda drawn: drawn):
    p.grad = gradient(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)))
    optimizer.step()


def told(mode):
    """What cannot be fused is said; calls have nothing to say."""
    return pytest.warns(UserWarning, match="memory|gradient") if mode == "fused" else nullcontext()


def test_rows_that_were_cut_off_are_left_alone():
    """Of a state; for a weight see `test_bad_inputs`."""
    p, optimizer = start(fused=True)
    step(p, optimizer, 0)
    state = optimizer.state[p]["exp_avg_sq"]
    whole = state.data
    rest = whole[4:].clone()
    state.data = whole[:4]
    with pytest.raises(InputError, match="shape"):
        step(p, optimizer, 1)
    assert torch.equal(whole[4:], rest)


def test_another_order_at_the_same_address_is_noticed():
    found = []
    for mode in ("fused", "foreach"):
        p, optimizer = start(**{mode: True})
        step(p, optimizer, 0)
        p.data = p.data.t()
        with told(mode):
            step(p, optimizer, 1)
        found.append([("weight", p)])
    assert_alike(*found)


@pytest.mark.parametrize("begun", [0, 3])
def test_a_wrapped_gradient_is_no_zero(begun):
    """Also where loops have begun."""
    found = []
    for mode in ("fused", "foreach"):
        p, optimizer = start(**{mode: True})
        for number in range(begun):
            step(p, optimizer, number)
        before = p.detach().clone()
        with told(mode):
            step(p, optimizer, begun, gradient=lambda g: TwoTensor(g, g.clone()))
        assert (p.detach() - before).abs().max() > 1e-5
        found.append(optimizer)
    assert_rounded_alike(*found)


@both_modes
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_counts_are_float32_whatever_the_default_is(mode, default):
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        p = torch.ones(8, 8, dtype=torch.float32).requires_grad_()
        optimizer = ScaledAdam([p], clipping_scale=2.0, **{mode: True})
        for _ in range(5):
            p.grad = torch.ones(8, 8, dtype=torch.float32)
            optimizer.step()
    finally:
        torch.set_default_dtype(before)
    state = optimizer.state[p]
    assert {state[n].dtype for n in ("step", "skipped", "num_clipped")} == {torch.float32}
    assert state["step"].item() == 5


def test_another_default_device():
    found = []
    for device in ("meta", "cpu"):
        p, optimizer = start(ScaledAdam, fused=True, clipping_scale=2.0)
        draw = torch.Generator().manual_seed(0)
        gradients = [torch.randn(8, 8, generator=draw) for _ in range(9)]
        with torch.device(device):
            for gradient in gradients:
                p.grad = gradient
                optimizer.step()
        found.append(p.detach().clone())
    assert torch.equal(*found)


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


@covering(
    make=[LANS, ScaledAdam],
    dtype=[torch.float32, torch.bfloat16],
    change=LAYOUTS,
    place=["first", "exp_avg_sq", "master_weight", "step"],
)
@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
def test_memory_of_states_in_another_type_or_order(make, dtype, change, place):
    """Its object stays the same; loops must not take it for what it was."""
    name = {LANS: "exp_avg", ScaledAdam: "delta"}[make] if place == "first" else place

    def trained(mode):
        draw = torch.Generator().manual_seed(0)
        p = torch.randn(6, 6, generator=draw).to(dtype).requires_grad_()
        optimizer = make([p], **{mode: True})
        for number in range(6):
            state = optimizer.state[p].get(name)
            if number == 2 and state is not None and (state.ndim or change is not transposed):
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
