"""Options of groups, types in groups, and parameters of any size."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad._checks import InputError
from tests.contracts.problems import (
    PeakMemory,
    assert_same,
    give_gradients,
    parameters,
    run,
    snapshot,
)
from tests.contracts.table import OPTIMIZERS, TABLE

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_optimizer = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)

# LAMB's global norm is over all groups; `tests/unit/optim/test_equations.py` looks at it.
APART = {name: entry for name, entry in TABLE.items() if "max_grad_norm" not in entry.options}
every_optimizer_apart = pytest.mark.parametrize("entry", APART.values(), ids=APART)


def variants(entry):
    """Options that a group of this optimizer may have: those of the whole table, and others."""
    own = [e.options for e in OPTIMIZERS.values() if e.make is entry.make]
    # Each differs from the defaults of all optimizers.
    others = [
        {"lr": 0.02, "betas": entry.betas, "eps": 1e-4},
        {"maximize": True, "foreach": False, "fused": False},
        {"master_weights": False},
    ]
    return [*(dict(options) for options in own if "max_grad_norm" not in options), *others]


def everything(optimizer, params):
    """Weights, and state but for the count of skipped steps."""
    found = [p.detach() for p in params]
    for p in params:
        state = optimizer.state[p]
        found += [state[name] for name in sorted(state) if name != "skipped"]
    return found


@pytest.mark.few(7)
@pytest.mark.usefixtures("same_bits_at_all_places")
@every_optimizer_apart
@pytest.mark.parametrize("later", [False, True], ids=["at once", "added later"])
def test_every_option_is_a_groups_own(entry, later):
    """Groups of one optimizer go as an optimizer each would, to the bit."""
    sets = [parameters(torch.bfloat16) for _ in variants(entry)]
    twins = [parameters(torch.bfloat16) for _ in sets]
    groups = [{"params": s, **v} for s, v in zip(sets, variants(entry), strict=True)]
    optimizer = entry(groups[:1] if later else groups)
    for group in groups[1:] if later else ():
        optimizer.add_param_group(group)
    alone = [entry(t, **v) for t, v in zip(twins, variants(entry), strict=True)]
    for step in range(12):
        for own in sets:
            give_gradients(own, step)
        optimizer.step()
        for twin, other in zip(twins, alone, strict=True):
            run(other, twin, [step])
    for own, twin, other in zip(sets, twins, alone, strict=True):
        assert_same(everything(optimizer, own), everything(other, twin))
    # The options did something: groups are the same where all their options are, and only there.
    results = [str([t.tolist() for t in everything(optimizer, own)]) for own in sets]
    options = [str(sorted({**g, "params": 0}.items())) for g in optimizer.param_groups]
    assert len(set(zip(results, options, strict=True))) == len(set(results)) == len(set(options))


@every_optimizer
def test_maximizing_is_minimizing_the_negative(entry):
    up, down = parameters(), parameters()
    ours, theirs = entry(up, maximize=True), entry(down)
    for step in range(12):
        give_gradients(up, step)
        give_gradients(down, step)
        for p in up:
            p.grad = None if p.grad is None else -p.grad
        ours.step()
        theirs.step()
    assert_same(snapshot(ours, up), snapshot(theirs, down))


@pytest.mark.usefixtures("same_bits_at_all_places")
@every_optimizer_apart
def test_types_in_one_group_do_not_touch_each_other(entry):
    mixed = [parameters(dtype) for dtype in DTYPES]
    alone = [parameters(dtype) for dtype in DTYPES]
    optimizer = entry([p for own in mixed for p in own])
    others = [entry(own) for own in alone]
    # Clipping goes by the norm of the whole group, and begins with the period's end.
    steps = range(3) if entry.options.get("clipping_scale") else range(9)
    for step in steps:
        for own in mixed:
            give_gradients(own, step)
        optimizer.step()
        for own, other in zip(alone, others, strict=True):
            run(other, own, [step])
    assert_same([p.detach() for own in mixed for p in own], [p.detach() for a in alone for p in a])


class Seen(TorchDispatchMode):
    """Names of the operations that get a tensor of 2^31 elements or more."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        if any(isinstance(t, torch.Tensor) and t.numel() >= 2**31 for t in leaves):
            self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.few(7)
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_elements_than_32_bits_count(entry, dtype):
    """On tensors without memory: every operation takes them, none goes to 32-bit BLAS."""
    size = 2**31 + 8
    p = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
    optimizer = entry([p], foreach=True)
    for _ in range(5):
        p.grad = torch.empty(size, dtype=dtype, device="meta")
        with Seen() as seen, PeakMemory() as memory:
            optimizer.step()
    assert all(optimizer.state[p][name].shape == (size,) for name in entry.large)
    assert "_foreach_norm" in seen.names
    assert not seen.names & {"dot", "vdot", "mv", "mm", "addmm"}
    assert size <= memory.peak <= 2 * 4 * size + 2**16


@every_optimizer
def test_parameters_that_are_not_dense_are_refused(entry):
    sparse = torch.eye(3).to_sparse().requires_grad_()
    with pytest.raises(InputError, match=r"dense parameters.*sparse.*to_dense"):
        entry([sparse])


@every_optimizer
def test_a_group_that_was_exchanged_is_noticed(entry):
    """As by a wrapper that puts a new dictionary with the same parameters into the list."""
    ours, theirs = parameters(), parameters()
    optimizer, twin = entry(ours), entry(theirs)
    run(optimizer, ours, range(3))
    run(twin, theirs, range(3))
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    twin.param_groups[0]["lr"] = 0.5
    run(optimizer, ours, range(3, 6))
    run(twin, theirs, range(3, 6))
    assert_same(snapshot(optimizer, ours), snapshot(twin, theirs))
