"""Every mode of a step gives the same weights, and none waits for the device."""

from itertools import cycle

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from steadygrad.optim import checks, loops
from steadygrad.optim.buckets import BUCKET
from tests.contracts.problems import (
    DTYPES,
    PeakMemory,
    Watch,
    assert_rounded_alike,
    assert_same,
    give_gradients,
    parameters,
    run,
    snapshot,
)
from tests.contracts.table import OPTIMIZERS, every_optimizer
from tests.covering import covering
from tests.rounding import ROUNDINGS

FOREACH = {"foreach": True, "one": False, "any": None}


def cases():
    """Each type with no options of its own, and each set of options with one of the types."""
    for name, entry in OPTIMIZERS.items():
        own = [some for e in OPTIMIZERS.values() if e.make is entry.make for some in e.others]
        betas = {"betas": entry.betas}, {"lr": 0.02, "betas": (0.0,) * len(entry.betas)}
        shared = {"lr": torch.tensor(0.02)}, {"eps": 1e-3, "maximize": True}, {"capturable": True}
        for options, dtype in zip([{}] * 4 + [*betas, *shared, *own], cycle(DTYPES)):
            yield pytest.param(entry, options, dtype, id=f"{name}-{options}-{dtype}")


@pytest.mark.few(30)
@pytest.mark.parametrize(("entry", "options", "dtype"), list(cases()))
def test_all_modes_agree(entry, options, dtype):
    """Over steps with None gradients and a 0-d parameter."""
    modes = {"foreach": True}, {"foreach": False}, {"fused": True}, {}
    sets, optimizers = [parameters(dtype) for _ in modes], []
    for params, mode in zip(sets, modes, strict=True):
        optimizers.append(entry(params, **{**options, **mode}))
        run(optimizers[-1], params, range(12))
    foreach, single, fused, default = map(snapshot, optimizers, sets)
    assert_same(foreach, single)
    assert_same(fused, default)
    # Sums in another order, products before quotients. With other options one element's average may
    # cancel, and the trust ratio keeps what is left: 300 to 600 roundings of its weight, as many as
    # between foreach=True in float32 and in float64.
    assert_rounded_alike(optimizers[2], optimizers[0], roundings=1024 if options else ROUNDINGS)
    assert not torch.equal(sets[0][0], parameters(dtype)[0])


@pytest.mark.slow
@every_optimizer
@pytest.mark.parametrize(
    ("backend", "dtype"), [("counter", torch.float64), ("aot_eager", torch.bfloat16)], ids=str
)
def test_a_compiled_step_is_the_same(entry, backend, dtype):
    """And is compiled once, whatever the rate is, and what a gradient or weight becomes."""
    params, others = parameters(dtype), parameters(dtype)
    rate = torch.tensor(0.01)
    ours, theirs = entry(params, lr=rate), entry(others, lr=0.01)
    counter = CompileCounter()
    torch._dynamo.reset()
    given = counter if backend == "counter" else backend
    step = torch.compile(ours.step, backend=given, fullgraph=True)
    for i in range(8):
        rate.fill_(0.01 * (1 + i % 5))
        theirs.param_groups[0]["lr"] = float(rate)
        for own in (params, others):
            give_gradients(own, i, none=False)
            if i == 3:
                own[4].grad[0, 1, 0] = torch.inf
            if i == 4:
                own[0].data[0, 0] = 0.75  # written from outside, between two compiled steps
        step()
        theirs.step()
    assert ours.skipped == theirs.skipped == 1
    assert counter.frame_count == (backend == "counter")
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
            assert memory.peak <= 41 * 1024
        else:
            count = 7 if entry.coded and dtype is not torch.float64 else 2
            assert BUCKET < memory.peak <= count * BUCKET * wide + 64 * 1024


# Without the two for profilers, which are torch's.
MOST = {"lans": 250, "lamb": 200, "scaled_adam-clipped": 300}


@pytest.mark.parametrize(("name", "most"), MOST.items())
def test_a_step_takes_few_calls_of_operators(name, most):
    """With the 148 tensors of a GPT-2, in every step but the first; half of them are no vectors."""
    norm = [(16,), (16,)]
    block = [*norm, (48, 16), (48,), (16, 16), (16,), *norm, (64, 16), (64,), (16, 64), (16,)]
    params = [torch.ones(s).requires_grad_() for s in [(64, 16), (9, 16), *block * 12, *norm]]
    # Its thresholds are taken at 10, 20 and 40 steps, too.
    more = {"clipping_update_period": 100} if "clipped" in name else {}
    optimizer, counts = OPTIMIZERS[name](params, foreach=True, **more), []
    for step in range(12):
        give_gradients(params, step, none=False)
        with Watch() as watch:
            optimizer.step()
        counts.append(sum(not called.startswith("_record") for called in watch.names))
    assert len(params) == 148
    assert most // 2 < min(counts) <= max(counts[1:]) <= most


@every_optimizer
def test_fused_falls_back_with_one_warning(entry, monkeypatch):
    monkeypatch.setattr(loops, "why_none", lambda device: "numba is not installed")
    checks.warn_once.cache_clear()
    fused, default, plain = parameters(), parameters(), parameters()
    optimizer = entry(fused, fused=True)
    with pytest.warns(UserWarning, match="numba is not installed") as caught:
        run(optimizer, fused, range(5))
    assert len(caught) == 1
    run(entry(default), default, range(5))  # who asks for nothing is told nothing
    run(entry(plain, foreach=True), plain, range(5))
    assert_same(fused, plain)
    assert_same(default, plain)


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
    # Beside codes roots are taken in float64.
    assert size <= memory.peak <= (4 if entry.coded else 2) * 4 * size + 2**16
