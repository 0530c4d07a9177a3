"""Sixteen bits without masters, and models that are cast after their optimizer was made."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad import numerics
from tests.contracts.problems import assert_same, give_gradients, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS
from tests.covering import covering
from tests.rounding import assert_alike

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
NARROW = [torch.bfloat16, torch.float16]
# None: compiled loops.
MODES = {"foreach": True, "single": False, "fused": None}
every_mode = pytest.mark.parametrize("foreach", MODES.values(), ids=MODES)


def twin_of(params):
    return [p.detach().float().requires_grad_() for p in params]


def state_of(optimizer, params):
    return [
        {n: t for n, t in optimizer.state[p].items() if n not in ("skipped", "master_weight")}
        for p in params
    ]


# Not pairs alone: each mode of each optimizer has code of its own for each type.
@pytest.mark.few(12)
@every_optimizer
@every_mode
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_without_a_master_a_step_is_that_in_float32_rounded_once(entry, dtype, foreach):
    params = parameters(dtype)
    optimizer = entry(params, master_weights=False, foreach=foreach)
    for step in range(9):
        twin = twin_of(params)
        other = entry(twin, foreach=foreach)
        for p, q in zip(params, twin, strict=True):
            other.state[q].update({n: t.clone() for n, t in optimizer.state[p].items()})
        other._fill_state()
        give_gradients(params, step)
        for p, q in zip(params, twin, strict=True):
            q.grad = None if p.grad is None else p.grad.float()
        optimizer.step()
        other.step()
        # Loops for 16 bits may add up in another order than those for float32; two operations of
        # the weight's own update may be one rounding in float32 and a tie in 16 bits apart.
        rounded = [("weight", q.to(dtype)) for q in twin]
        assert_alike([("weight", p) for p in params], rounded, roundings=8)
        ours, theirs = state_of(optimizer, params), state_of(other, twin)
        assert [state.keys() for state in ours] == [state.keys() for state in theirs]
        pairs = [[item for state in states for item in state.items()] for states in (ours, theirs)]
        assert_alike(*pairs, roundings=8)


@pytest.mark.few(6)
@covering(entry=OPTIMIZERS, foreach=MODES, size=[300.0, 30000.0])
def test_fp16_without_a_master_takes_every_finite_gradient(entry, foreach, size):
    """Sums of squares, and products with the weights, are past fp16's range."""
    params = [torch.full((64, 64), 2.0, dtype=torch.float16, requires_grad=True)]
    optimizer = entry(params, lr=0.5, master_weights=False, foreach=foreach)
    before = params[0].detach().clone()
    for step in range(3):
        params[0].grad = torch.full_like(params[0], size * (1, -2, 0.5)[step])
        optimizer.step()
    assert optimizer.skipped == 0
    assert not torch.equal(params[0], before)
    assert torch.isfinite(params[0]).all()


@covering(
    entry={name: entry for name, entry in OPTIMIZERS.items() if not entry.joint},
    foreach=MODES,
    order=[(torch.bfloat16, torch.float32), (torch.float32, torch.float16)],
)
@pytest.mark.usefixtures("same_bits_at_all_places")
def test_narrow_and_wide_parameters_in_one_group_without_masters(entry, foreach, order):
    draw = torch.Generator().manual_seed(0)
    # The first is large, so that the two others are worked on in one call if they are together.
    shapes = zip([(20, 20), (6, 3), (6, 3)], (torch.float32, *order), strict=True)
    values = [torch.randn(s, generator=draw).to(t).requires_grad_() for s, t in shapes]
    alone = [v.detach().clone().requires_grad_() for v in values]
    together = entry(values, master_weights=False, foreach=foreach)
    apart = [entry([v], master_weights=False, foreach=foreach) for v in alone]
    for step in range(3):
        give_gradients(values, step, none=False)
        give_gradients(alone, step, none=False)
        together.step()
        for one in apart:
            one.step()
    assert all(torch.equal(a, b) for a, b in zip(values, alone, strict=True))


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.bfloat16),
    (torch.float32, torch.float64),
    (torch.float64, torch.float32),
    (torch.bfloat16, torch.float64),
]


@pytest.mark.few(14)
@covering(entry=OPTIMIZERS, cast=CASTS, foreach=MODES)
def test_a_cast_model_steps_as_one_whose_state_was_looked_at(entry, cast, foreach):
    first, then = cast
    results = []
    for look in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(first)
        params = list(model.parameters())
        optimizer = entry(params, foreach=foreach)
        run(optimizer, params, range(3), none=False)
        for p in params:
            p.grad = None
        model.to(then)
        if look:
            optimizer.state_dict()
        run(optimizer, params, range(3, 6), none=False)
        results.append(snapshot(optimizer, params))
    assert_same(*results)


@every_optimizer
@pytest.mark.parametrize("dtypes", [CASTS[0], CASTS[2]], ids=str)
def test_a_state_of_another_type_of_model_goes_on(entry, dtypes):
    first, then = dtypes
    params = parameters(first)
    optimizer = entry(params)
    run(optimizer, params, range(3))
    cast = [p.detach().to(then).requires_grad_() for p in params]
    other = entry(cast)
    other.load_state_dict(optimizer.state_dict())
    run(other, cast, range(3, 5))
    for p in cast:
        assert ("master_weight" in other.state[p]) == (then == torch.bfloat16)
        if p.numel():
            assert other.state[p]["step"] == 5 - (p is cast[1]) * (not entry.none_moves)
    assert all(torch.isfinite(p).all() for p in cast)


@every_optimizer
def test_masters_may_be_given_up_later(entry):
    params = parameters(torch.bfloat16)
    optimizer = entry(params)
    run(optimizer, params, range(2))
    optimizer.param_groups[0]["master_weights"] = False
    run(optimizer, params, [3])
    # An empty parameter takes no part in steps.
    assert not any("master_weight" in optimizer.state[p] for p in params if p.numel())
    assert not any("master_weight" in state for state in optimizer.state_dict()["state"].values())
    assert all(torch.isfinite(p).all() for p in params)


@every_optimizer
@every_mode
def test_a_model_cast_to_float64_keeps_its_digits(entry, foreach):
    p = torch.randn(5, 3).requires_grad_()
    optimizer = entry([p], lr=0.0, foreach=foreach)
    p.data = p.data.double() + torch.rand(5, 3, dtype=torch.float64) * 1e-9
    before = p.detach().clone()
    run(optimizer, [p], range(4), none=False)
    assert torch.equal(p, before)


class Types(TorchDispatchMode):
    """Types of all tensors that operations return."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(result)
        self.seen |= {t.dtype for t in leaves if isinstance(t, torch.Tensor)}
        return result


@every_optimizer
def test_devices_without_float64(entry, monkeypatch):
    """Columns are of float32 there, as on Apple's: the same but for its rounding."""
    narrow, wide = parameters(), parameters()
    theirs = entry(wide, foreach=True)
    run(theirs, wide, range(12))
    monkeypatch.setattr(numerics, "_WIDEST", {"cpu": torch.float32})
    ours = entry(narrow, foreach=True)
    with Types() as types:
        run(ours, narrow, range(6))
        ours.load_state_dict(ours.state_dict())
        run(ours, narrow, range(6, 12))
    assert torch.float32 in types.seen
    assert torch.float64 not in types.seen
    # A correction of one less a power near one loses up to four of seven digits in the first steps.
    for a, b in zip(narrow, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-4, atol=2e-5)
