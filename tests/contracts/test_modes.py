"""Every mode of a step gives the same weights, and none waits for the device."""

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from steadygrad.optim import loops
from steadygrad.optim.batch import BUCKET
from tests.contracts.problems import (
    Calls,
    PeakMemory,
    Watch,
    assert_rounded_alike,
    assert_same,
    give_gradients,
    parameters,
    run,
    snapshot,
)
from tests.contracts.table import OPTIMIZERS, TABLE
from tests.covering import covering

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_optimizer_and_mode = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
FOREACH = {"foreach": True, "one": False, "any": None}


@pytest.mark.few(14)
@every_optimizer
@every_type
def test_foreach_equals_one_parameter_at_a_time(entry, dtype):
    """Weights and state to the bit, over 9 steps with None gradients and a 0-d parameter."""
    params, others = parameters(dtype), parameters(dtype)
    optimizer, plain = entry(params, foreach=True), entry(others, foreach=False)
    run(optimizer, params, range(9))
    run(plain, others, range(9))
    assert_same(snapshot(optimizer, params), snapshot(plain, others))


@pytest.mark.few(14)
@every_optimizer
@every_type
def test_fused_equals_foreach_but_for_rounding(entry, dtype):
    compiled, calls = parameters(dtype), parameters(dtype)
    ours, theirs = entry(compiled, fused=True), entry(calls, foreach=True)
    run(ours, compiled, range(12))
    run(theirs, calls, range(12))
    # Sums in another order, products before quotients.
    assert_rounded_alike(ours, theirs)


@every_optimizer
@every_type
def test_fused_is_the_default(entry, dtype):
    compiled, default = parameters(dtype), parameters(dtype)
    ours, theirs = entry(compiled, fused=True), entry(default)
    run(ours, compiled, range(5))
    run(theirs, default, range(5))
    assert_same(snapshot(ours, compiled), snapshot(theirs, default))


def compile_step(optimizer, backend):
    torch._dynamo.reset()
    return torch.compile(optimizer.step, backend=backend, fullgraph=True)


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_one_compilation_and_the_same_steps(entry, dtype):
    compiled, eager = parameters(dtype), parameters(dtype)
    rate = torch.tensor(0.01)
    ours, theirs = entry(compiled, lr=rate), entry(eager, lr=0.01)
    counter = CompileCounter()
    step = compile_step(ours, counter)
    for i in range(20):
        lr = 0.01 * (1 + i % 5)
        rate.fill_(lr)
        theirs.param_groups[0]["lr"] = lr
        give_gradients(compiled, i, none=False)
        give_gradients(eager, i, none=False)
        step()
        theirs.step()
    assert counter.frame_count == 1
    # The rate of one is a float32 tensor, of the other a Python float; float16 may round apart.
    assert_rounded_alike(ours, theirs)


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize(
    ("backend", "dtype"), [("eager", torch.float64), ("aot_eager", torch.bfloat16)], ids=str
)
def test_a_compiled_step_is_the_same(entry, backend, dtype):
    params, others = parameters(dtype), parameters(dtype)
    ours, theirs = entry(params), entry(others)
    step = compile_step(ours, backend)
    for i in range(5):
        # No gradient in step 2: another graph, as for any optimizer of torch.
        give_gradients(params, i)
        give_gradients(others, i)
        if i == 3:
            params[4].grad[0, 1, 0] = others[4].grad[0, 1, 0] = torch.inf
        if i == 4:
            for p in (params[0], others[0]):
                p.data[0, 0] = 0.75  # written from outside, between two compiled steps
        step()
        theirs.step()
    assert ours.skipped == theirs.skipped == 1
    # The compiled step is made of torch's calls, the other of compiled loops.
    assert_rounded_alike(ours, theirs)


@pytest.mark.few(14)
@covering(entry=OPTIMIZERS, dtype=DTYPES[1:], foreach=FOREACH)
def test_no_mode_waits_for_the_device(entry, dtype, foreach):
    params = parameters(dtype)
    optimizer = entry(params, lr=torch.tensor(0.01), foreach=foreach)
    for step in range(12):
        give_gradients(params, step)
        if step == 7:
            params[0].grad[0, 0] = torch.nan
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(2.0)
        with Watch() as watch:
            optimizer.step()
        assert watch.waits == []
    assert optimizer.skipped == 1
    with Watch() as control:
        params[1].sum().item()
    assert len(control.waits) == 1


@pytest.mark.few(8)
@covering(
    entry=OPTIMIZERS,
    dtype=DTYPES,
    masters={"masters": True, "no masters": False},
    foreach=FOREACH,
)
def test_no_mode_needs_more_than_two_temporaries(entry, dtype, masters, foreach):
    """Of the largest parameter, or of all that are worked on together; compiled loops need none.

    Five more for codes: two moments as numbers, their floors, roots in float64.
    """
    shapes = [*[(64, 64)] * 20, (1024, 1024), *[(64, 64)] * 20]
    assert BUCKET == 1024 * 1024
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in shapes]
    optimizer = entry(params, foreach=foreach, master_weights=masters)
    for step in range(2):
        give_gradients(params, step, none=False)
        with PeakMemory() as memory:
            optimizer.step()
        # Besides them, some numbers for each parameter.
        wide = 8 if dtype is torch.float64 else 4
        if foreach is None:
            assert 0 < memory.peak <= 41 * 1024
        else:
            count = 7 if entry.coded and dtype is not torch.float64 else 2
            assert BUCKET < memory.peak <= count * BUCKET * wide + 64 * 1024


@every_optimizer
def test_small_tensors_are_worked_on_together(entry):
    """Also where all have one shape, and so none is larger than the others."""
    counts = {}
    for foreach in (True, False):
        params = [torch.ones(64, 64, requires_grad=True) for _ in range(50)]
        optimizer = entry(params, foreach=foreach)
        give_gradients(params, 0, none=False)
        with Calls() as calls:
            optimizer.step()
        counts[foreach] = calls.count
    # Codes are made of one tensor at a time.
    assert counts[True] < (0.8 if entry.coded else 0.35) * counts[False]


@pytest.mark.few(28)
@covering(entry=TABLE, dtype=DTYPES, shape=[(), (1,)])
def test_a_tensor_learning_rate_is_the_same(entry, dtype, shape):
    floats, tensors = parameters(dtype), parameters(dtype)
    one = entry(floats, lr=0.01)
    two = entry(tensors, lr=torch.full(shape, 0.01, dtype=torch.float64))
    for step in range(8):
        rate = 0.01 / (1 + step)
        one.param_groups[0]["lr"] = rate
        two.param_groups[0]["lr"].fill_(rate)
        run(one, floats, [step])
        run(two, tensors, [step])
    assert_same(floats, tensors)


def test_defaults_leave_the_mode_open():
    for entry in OPTIMIZERS.values():
        group = entry(parameters()).param_groups[0]
        assert (group["foreach"], group["fused"], group["capturable"]) == (None, None, False)


@every_optimizer
def test_fused_falls_back_with_one_warning(entry, monkeypatch):
    monkeypatch.setattr(loops, "why_none", lambda device: "numba is not installed")
    monkeypatch.setattr(loops, "_WARNED", set())
    fused, default, plain = parameters(), parameters(), parameters()
    optimizer = entry(fused, fused=True)
    with pytest.warns(UserWarning, match=r"fused kernel.*numba is not installed.*Remedy") as caught:
        run(optimizer, fused, range(5))
    assert len(caught) == 1
    run(entry(default), default, range(5))  # who asks for nothing is told nothing
    run(entry(plain, foreach=True), plain, range(5))
    assert_same(fused, plain)
    assert_same(default, plain)
