"""Steps find every tensor where it lies now, and write to no memory that is not theirs."""

import gc
import weakref
from contextlib import nullcontext

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from steadygrad.optim import LANS, ScaledAdam, checks
from tests.contracts.problems import assert_rounded_alike, assert_same, give_gradients

both_modes = pytest.mark.parametrize("mode", ["fused", "foreach"])


def clipped(params, **mode):
    return ScaledAdam(params, clipping_scale=2.0, **mode)


def start():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=draw).requires_grad_() for s in ((6, 6), (7,), ())]


def transposed(x):
    return x.t().contiguous().t()


def move_weight(params, state, step):
    params[0].data = params[0].detach().clone()


def turn_weight(params, state, step):
    """Another order at the same address."""
    params[0].data = params[0].data.t()


def move_memory_of_state(params, state, step):
    state["exp_avg_sq"].data = torch.full((6, 6), 0.5)


def turn_memory_of_state(params, state, step):
    state["exp_avg_sq"].data = transposed(state["exp_avg_sq"].data)


def edit_count(params, state, step):
    """The first pass's numbers of the step before are no longer those that are needed."""
    state["step"].fill_(0 if step == 2 else 7)


def turn_gradient(params, state, step):
    params[0].grad = transposed(params[0].grad)
    # Views that are yet to be negated; one of a single element lies without gaps.
    for p in params[::2] if step == 5 else ():
        p.grad = torch.complex(p.grad, -p.grad).conj().imag


def borrow_gradient(params, state, step):
    params[0].grad = torch.nn.Parameter(params[0].grad)


CHANGES = [
    borrow_gradient,
    move_weight,
    turn_weight,
    move_memory_of_state,
    turn_memory_of_state,
    edit_count,
    turn_gradient,
]


@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
@pytest.mark.parametrize("make", [LANS, clipped])
@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_steps_is_noticed(make, change):
    found = []
    for mode in ({"fused": True}, {"foreach": True}):
        params = start()
        optimizer = make(params, **mode)
        for step in range(7):
            give_gradients(params, step, none=False)
            if step in (2, 5):
                change(params, optimizer.state[params[0]], step)
            optimizer.step()
        found.append(optimizer)
    assert_rounded_alike(*found)


@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
def test_a_wrapped_gradient_is_no_zero():
    """Also where loops have begun."""
    found = []
    for mode in ({"fused": True}, {"foreach": True}):
        p = start()[0]
        optimizer = LANS([p], **mode)
        for step in range(4):
            give_gradients([p], step, none=False)
            if step == 3:
                p.grad = TwoTensor(p.grad, p.grad.clone())
            before = p.detach().clone()
            optimizer.step()
        assert (p.detach() - before).abs().max() > 1e-5
        found.append(optimizer)
    assert_rounded_alike(*found)


@both_modes
def test_what_is_of_no_use_any_more_is_let_go(mode):
    """Gradients and weights after a step, and states after a load."""
    params = start()
    optimizer = clipped(params, **{mode: True})
    give_gradients(params, 0, none=False)
    gradients = [weakref.ref(p.grad) for p in params]
    optimizer.step()
    optimizer.zero_grad()
    gc.collect()
    assert [one() for one in gradients] == [None] * 3
    state = weakref.ref(optimizer.state[params[0]]["exp_avg_sq"])
    optimizer.load_state_dict(optimizer.state_dict())
    give_gradients(params, 1, none=False)
    optimizer.step()
    gc.collect()
    assert state() is None
    weight = weakref.ref(params[0].untyped_storage())
    params[0].grad = None
    params[0].data = torch.empty(0)
    assert weight() is None


def test_what_loops_cannot_take_goes_by_calls(monkeypatch):
    checks.warn_once.cache_clear()
    found = []
    for mode in ("fused", "foreach"):
        base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
        params = [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]
        optimizer = clipped(params, **{mode: True})
        for step in range(4):
            give_gradients(params, step, none=False)
            is_told = mode == "fused" and step == 0
            with pytest.warns(UserWarning, match="strides") if is_told else nullcontext():
                optimizer.step()
        found.append(optimizer)
    assert_rounded_alike(*found)


@both_modes
@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16, "meta"], ids=str)
def test_what_torch_makes_by_default_does_not_matter(mode, default):
    """Types and devices."""
    found, before = [], torch.get_default_dtype()
    for is_changed in (False, True):
        p = start()[0]
        optimizer = clipped([p], **{mode: True})
        gradients = torch.randn(9, 6, 6, generator=torch.Generator().manual_seed(0))
        if is_changed and default != "meta":
            torch.set_default_dtype(default)
        try:
            with torch.device("meta" if is_changed and default == "meta" else "cpu"):
                for gradient in gradients:
                    p.grad = gradient
                    optimizer.step()
        finally:
            torch.set_default_dtype(before)
        found.append([p.detach(), *optimizer.state[p].values()])
    assert_same(*found)


# In the one step that is unlike the others: type, size of the weights and of the gradients, and
# which it is: every fourth looks at sizes. Last, how many steps are skipped.
RANGES = {
    # 5e19 squared is past float32's range, though the gradient's own squares are not.
    "an inner product between two size steps": (torch.float32, 1e9, 0.5e9, 5, 0),
    "an inner product at a size step": (torch.float32, 1e9, 0.5e9, 7, 1),
    # Their norm is taken at size steps only.
    "weights that grew since": (torch.float32, 1e25, 1e3, 5, 0),
    # Float64 weights, whose state the current recipe keeps in float32.
    "a gradient past float32": (torch.float64, 1.0, 1e25, 2, 1),
    "squares past float64": (torch.float64, 1.0, 1e155, 2, 1),
}


@both_modes
@pytest.mark.parametrize("case", RANGES)
def test_products_that_overflow_skip_a_step_that_needs_them(case, mode):
    """An inner product is used at a size step only; taken along by another it counts as zero."""
    dtype, weight, gradient, at, skipped = RANGES[case]
    p = torch.ones(100, dtype=dtype, requires_grad=True)
    optimizer = ScaledAdam([p], **{mode: True})
    for number in range(12):
        p.data.fill_(weight if number == at else 1.0)
        p.grad = torch.full_like(p, gradient if number == at else 1.0)
        optimizer.step()
        if number == at and not skipped:
            assert optimizer.state[p]["scale_grads"][at % 4] == 0
    assert optimizer.skipped == skipped
    assert p.isfinite().all()
    assert all(t.isfinite().all() for n, t in optimizer.state[p].items() if "threshold" not in n)


@both_modes
def test_weights_that_are_not_finite_skip_steps_until_they_are_mended(mode):
    params, moved = start(), []
    optimizer = ScaledAdam(params, **{mode: True})
    for number in range(12):
        if number == 5:
            kept = params[0].detach().clone()
            params[0].data[0, 0] = torch.nan
        if number == 9:
            params[0].data.copy_(kept)
        give_gradients(params, number, none=False)
        before = params[1].detach().clone()
        optimizer.step()
        moved.append(not torch.equal(params[1], before))
    # It is learned at the next size step, the eighth, in every mode.
    assert moved == [True] * 7 + [False] * 2 + [True] * 3
    assert optimizer.skipped == 2
    states = optimizer.state[params[0]].items()
    assert all(t.isfinite().all() for name, t in states if "threshold" not in name)


@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
@pytest.mark.parametrize("make", [LANS, clipped])
def test_states_that_were_cast_to_16_bits_are_read_as_numbers(make):
    found = []
    for mode in ({"fused": True}, {"foreach": True}):
        params = start()
        optimizer = make(params, **mode)
        for step in range(4):
            give_gradients(params, step, none=False)
            optimizer.step()
            for name, kept in optimizer.state[params[0]].items():
                if kept.shape == params[0].shape:
                    optimizer.state[params[0]][name] = kept.bfloat16()
        found.append(torch.cat([p.detach().flatten() for p in params]))
    # Steps are below 0.1, and their last digit is an eighth bit.
    torch.testing.assert_close(*found, rtol=0, atol=0.1 * 2**-8)


def test_betas_that_change_in_place_are_looked_at():
    optimizer = LANS(start(), betas=[0.9, 0.99])
    optimizer.step()
    optimizer.param_groups[0]["betas"][0] = 2.0
    with pytest.raises(ValueError, match="betas"):
        optimizer.step()
