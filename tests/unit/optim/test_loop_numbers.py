"""Numbers that compiled loops read and round as torch does, and the chunks that they share."""

import numpy as np
import pytest
import torch
from numba import njit

from steadygrad.optim import LAMB, LANS
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.loops import numbers, runtime
from steadygrad.optim.loops.numbers import BLOCK
from steadygrad.optim.loops.runtime import CHUNK, Table
from tests.contracts.problems import assert_same, give_gradients, threads

KINDS = {torch.bfloat16: np.uint16, torch.float16: np.int16}
FLOATS = (torch.float32,) * 5


# With the flags that the loops are compiled with.
@njit(fastmath=numbers.FAST, error_model="numpy")
def widen_all(given, found):
    for i in range(len(given)):
        found[i] = numbers.widen(given[i])


@njit(fastmath=numbers.FAST, error_model="numpy")
def narrow_all(given, found):
    for i in range(len(given)):
        found[i] = numbers.narrow(given[i], found[i])


def assert_same_numbers(found, expected):
    assert torch.equal(found.isnan(), expected.isnan())
    # As bits, so that the sign of zero counts.
    kind = torch.int16 if found.element_size() == 2 else torch.int32
    known = ~expected.isnan()
    assert torch.equal(found[known].view(kind), expected[known].view(kind))


@pytest.mark.parametrize(("dtype", "bits"), KINDS.items(), ids=map(str, KINDS))
def test_every_16_bit_number_is_read_and_others_are_rounded_to_the_nearest(dtype, bits):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    exact, found = every.view(dtype).float(), np.zeros(2**16, np.float32)
    widen_all(every.numpy().view(bits), found)
    assert_same_numbers(torch.from_numpy(found), exact)
    exact = exact[exact.isfinite()].sort().values
    halfway = (exact[:-1].double() + exact[1:].double()).div(2).float()
    draw = torch.Generator().manual_seed(0)
    noise = torch.randint(-(2**31), 2**31, (100_000,), generator=draw, dtype=torch.int64)
    top = torch.finfo(dtype).max
    extreme = torch.tensor([torch.inf, -torch.inf, torch.nan, top * 1.001, 3.4e38, 1e-45, -0.0])
    parts = [exact, halfway, noise.to(torch.int32).view(torch.float32), extreme]
    given = torch.cat([*parts, *(torch.nextafter(halfway, e) for e in extreme[:2])])
    found = np.zeros(len(given), bits)
    narrow_all(given.numpy(), found)
    assert_same_numbers(torch.from_numpy(found.view(np.int16)).view(dtype), given.to(dtype))


def test_starts_beyond_two_to_the_31():
    table = Table([3 * 2**31], FLOATS, 1, (), [0])
    last = [0, 3 * 2**31 - CHUNK, CHUNK, 0, 3 * 2**31 // CHUNK, BLOCK]
    assert table.chunks[-1].tolist() == last
    assert table.chunks.dtype == np.int64


CASES = {
    "lans": (LANS, {"clip_value": 0.01, "lower_bound": 0.1}, torch.float32),
    "lans tensor lr": (LANS, {"lr": torch.tensor(0.01), "upper_bound": 2.0}, torch.bfloat16),
    "lamb": (LAMB, {"max_grad_norm": 1.0}, torch.float64),
    "lamb without ratio": (LAMB, {"adapt": False}, torch.float16),
}
# Two that threads share, several in one wave, one that is a wave's last.
WAVES = (8 * runtime.WAVE + 3, 1, 7, 30_000, runtime.WAVE - 30_000, 0, 40_000, 65_537)


def trained(make, options, dtype):
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw).to(dtype).requires_grad_() for n in WAVES]
    optimizer = make(params, **{"lr": 0.01, **options})
    for step in range(4):
        give_gradients(params, step, none=False)
        # One without a gradient, one of zeros, and a step that is left out.
        p = params[1 + step % 2]
        p.grad = None if step % 2 else torch.zeros_like(p)
        if step == 2:
            params[3].grad[5] = torch.inf
        optimizer.step()
    states = [optimizer.state[p] for p in params]
    weights = [s.get("master_weight", p.detach()) for p, s in zip(params, states, strict=True)]
    return weights, [s[name] for s in states for name in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.parametrize("case", CASES)
def test_waves_are_the_passes_by_any_number_of_threads(case, monkeypatch):
    make, options, dtype = CASES[case]
    with threads(4):
        shared = trained(make, options, dtype)
    with threads(1):
        weights, averages = trained(make, options, dtype)
    assert_same([*weights, *averages], [*shared[0], *shared[1]])
    monkeypatch.setattr(ShardedOptimizer, "_is_alone", False)
    expected, others = trained(make, options, dtype)
    assert_same(averages, others)
    # Roots of columns are torch's, which are off by a digit now and then.
    tolerance = 16 * torch.finfo(weights[0].dtype).eps
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)
    # Without chunks, which add up in another order; a step moves a weight by a hundredth.
    by_calls, _ = trained(make, {**options, "foreach": True}, dtype)
    torch.testing.assert_close(weights, by_calls, rtol=1e-5, atol=1e-5)
