"""Options of groups, types in groups, and parameters of any size."""

import pytest
import torch

from tests.contracts.problems import (
    DTYPES,
    PeakMemory,
    Watch,
    assert_same,
    clones,
    give_gradients,
    parameters,
    run,
    snapshot,
    tensors_of,
)
from tests.contracts.table import OPTIMIZERS, TABLE, every_optimizer, every_optimizer_and_mode

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


@pytest.mark.few(5)
@pytest.mark.usefixtures("same_bits_at_all_places")
@every_optimizer_apart
def test_every_option_is_a_groups_own(entry):
    """Groups of one optimizer go as an optimizer each would, to the bit; all but one come later."""
    sets = [parameters(torch.bfloat16) for _ in variants(entry)]
    twins = [parameters(torch.bfloat16) for _ in sets]
    first, *groups = [{"params": s, **v} for s, v in zip(sets, variants(entry), strict=True)]
    optimizer = entry([first])
    for group in groups:
        optimizer.add_param_group(group)
    alone = [entry(t, **v) for t, v in zip(twins, variants(entry), strict=True)]
    for step in range(12):
        for own in sets:
            give_gradients(own, step)
        optimizer.step()
        for twin, other in zip(twins, alone, strict=True):
            run(other, twin, [step])
    found = [[p, *optimizer.state[p].values()] for own in sets for p in own]
    expected = [
        [p, *other.state[p].values()]
        for twin, other in zip(twins, alone, strict=True)
        for p in twin
    ]
    for own, twin in zip(found, expected, strict=True):
        assert_same(own, twin)
    # The options did something: groups are the same where all their options are, and only there.
    results = [str([p.tolist() for p in own]) for own in sets]
    options = [str(sorted({**g, "params": 0}.items())) for g in optimizer.param_groups]
    assert len(set(zip(results, options, strict=True))) == len(set(results)) == len(set(options))


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


@every_optimizer_and_mode
def test_groups_may_be_added_emptied_and_taken_away(entry):
    """The rest goes on as if nothing had been: a group's joint step aside, which is its own."""
    params, late = parameters(), torch.full((5, 2), 0.5, requires_grad=True)
    twins = clones(params)
    optimizer, twin = entry([{"params": params}]), entry([{"params": twins}])

    def go_on_alike(*steps):
        run(optimizer, params, steps)
        run(twin, twins, steps)
        assert_same(params, twins)

    go_on_alike(0, 1)
    optimizer.add_param_group({"params": [late], "lr": 0.0})
    late.grad = torch.zeros_like(late)
    go_on_alike(2, 3)
    assert optimizer.state[late]["step"] == 2
    assert torch.equal(late, torch.full((5, 2), 0.5))
    optimizer.param_groups[1]["params"] = []
    go_on_alike(4, 5)
    assert late not in optimizer.state
    del optimizer.param_groups[1]
    go_on_alike(6, 7)
    assert_same([t for _, t in tensors_of(optimizer)], [t for _, t in tensors_of(twin)])


@every_optimizer_and_mode
def test_what_a_wrapper_exchanges_is_noticed(entry):
    """Parameters, as Accelerate prepares a model for `fully_shard`, and a group as a whole."""
    params, others = parameters(), parameters()
    optimizer, twin = entry(parameters()), entry(others)
    optimizer.param_groups[0]["params"] = [torch.empty(1) for _ in params]
    assert optimizer.skipped == 0
    optimizer.param_groups[0]["params"] = params
    optimizer.load_state_dict(optimizer.state_dict())
    run(optimizer, params, range(3))
    run(twin, others, range(3))
    assert {*optimizer.state} == {*params}
    optimizer.param_groups[0] = {**optimizer.param_groups[0], "lr": 0.5}
    twin.param_groups[0]["lr"] = 0.5
    run(optimizer, params, range(3, 6))
    run(twin, others, range(3, 6))
    assert_same(snapshot(optimizer, params), snapshot(twin, others))


@pytest.mark.few(4)
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_elements_than_32_bits_count(entry, dtype):
    """On tensors without memory: every operation takes them, none goes to 32-bit BLAS."""
    size = 2**31 + 8
    p = torch.empty(size, dtype=dtype, device="meta", requires_grad=True)
    optimizer = entry([p], foreach=True)
    for _ in range(5):
        p.grad = torch.empty(size, dtype=dtype, device="meta")
        with Watch() as watch, PeakMemory() as memory:
            optimizer.step()
    assert all(optimizer.state[p][name].shape == (size,) for name in entry.large)
    assert "_foreach_norm" in watch.large
    assert not watch.large & {"dot", "vdot", "mv", "mm", "addmm"}
    assert size <= memory.peak <= 2 * 4 * size + 2**16
