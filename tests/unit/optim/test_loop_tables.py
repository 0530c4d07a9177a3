"""The table of chunks covers every element once, in passes and in waves, and sums are exact."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from numba import njit

from steadygrad.optim import LAMB, LANS
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.layerwise_rule import LANS_PASSES, lengths
from steadygrad.optim.loops import layerwise, runtime
from steadygrad.optim.loops.numbers import BLOCK, GRAD
from steadygrad.optim.loops.runtime import CHUNK, Table
from tests.contracts.problems import assert_same
from tests.covering import covering

FLOATS = (torch.float32,) * 4
SIZES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 7]


def test_starts_beyond_two_to_the_31():
    table = Table([3 * 2**31], FLOATS, 1)
    last = [0, 3 * 2**31 - CHUNK, CHUNK, 0, 3 * 2**31 // CHUNK, BLOCK]
    assert table.chunks[-1].tolist() == last
    assert table.chunks.dtype == np.int64


def square_sums(tensors):
    """By the first pass; of None, zero."""
    table = Table(SIZES, FLOATS, 2)
    table.addresses[:, GRAD] = [0 if t is None else t.data_ptr() for t in tensors]
    batch = SimpleNamespace(
        tables=[table],
        device=torch.device("cpu"),
        sum_dtype=torch.float64,
        inverse_scale=None,
        seeds=None,
    )
    return LANS_PASSES.grad_sq_norms(batch)[0]


def test_sums_are_those_of_float64_by_any_number_of_threads():
    draw, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    tensors = [torch.randn(size, generator=draw) for size in SIZES]
    tensors[3] = None
    exact = [torch.zeros(()) if t is None else t.double().square().sum() for t in tensors]
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(square_sums(tensors))
    finally:
        torch.set_num_threads(before)
    # Blocks of 4096 are added up in float32, by 64 numbers side by side.
    torch.testing.assert_close(found[0], torch.stack(exact).double(), rtol=1e-6, atol=0)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_weights_move_by_the_sums_of_all_threads():
    tensor, found = torch.randn(5 * CHUNK + 3, generator=torch.Generator().manual_seed(0)), []
    before = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            p = tensor.clone().requires_grad_()
            optimizer = LANS([p], lr=0.1, fused=True)
            for _ in range(20):
                p.grad = tensor + p.detach()
                optimizer.step()
            found.append(p.detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


MAKERS = {
    "lans": lambda p, **k: LANS(p, lr=0.01, clip_value=0.01, lower_bound=0.1, **k),
    "lans tensor lr": lambda p, **k: LANS(p, lr=torch.tensor(0.01), upper_bound=2.0, **k),
    "lamb": lambda p, **k: LAMB(p, lr=0.01, max_grad_norm=1.0, **k),
    "lamb without ratio": lambda p, **k: LAMB(p, lr=0.01, adapt=False, **k),
}
# Two that threads share, several in one wave, one that is a wave's last.
WAVES = (8 * runtime.WAVE + 3, 1, 7, 30_000, runtime.WAVE - 30_000, 0, 40_000, 65_537)


def trained(make, dtype, **mode):
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw).to(dtype).requires_grad_() for n in WAVES]
    optimizer = make(params, **mode)
    for step in range(4):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=draw).to(dtype)
            # One without a gradient, one of zeros, and a step that is left out.
            if i == 1 + step % 2:
                p.grad = None if step % 2 else torch.zeros_like(p)
        if step == 2:
            params[3].grad[5] = torch.inf
        optimizer.step()
    states = [optimizer.state[p] for p in params]
    weights = [s.get("master_weight", p.detach()) for p, s in zip(params, states, strict=True)]
    return weights, [s[name] for s in states for name in ("step", "exp_avg", "exp_avg_sq")]


@pytest.mark.few(6)
@covering(make=MAKERS, dtype=[torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_waves_are_the_passes(make, dtype, monkeypatch):
    weights, averages = trained(make, dtype)
    monkeypatch.setattr(ShardedOptimizer, "_is_alone", False)
    expected, others = trained(make, dtype)
    assert_same(averages, others)
    # Roots of columns are torch's, which are off by a digit now and then.
    tolerance = 16 * torch.finfo(weights[0].dtype).eps
    torch.testing.assert_close(weights, expected, rtol=tolerance, atol=tolerance)
    # Without chunks, which add up in another order; a step moves a weight by a hundredth.
    by_calls, _ = trained(make, dtype, foreach=True)
    torch.testing.assert_close(weights, by_calls, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("threads", "shared", "waves"),
    [
        (1, [], [[3, 4], [0, 2], [5, 7], [4, 5], [2, 3]]),
        # More than a sixteenth of all elements.
        (2, [0, 1, 3, 5], [[4, 5], [2, 3], [6, 7]]),
    ],
)
def test_every_tensor_is_in_one_wave(threads, shared, waves, monkeypatch):
    monkeypatch.setattr(runtime, "WAVE", 10)
    table = Table([4, 6, 1, 30, 2, 9, 1], FLOATS, 2)
    counters, stops, found = table._plan(True, threads)
    assert counters[1:-1, 0].tolist() == [*np.repeat(shared, 2), 0]
    assert stops.tolist() == [*np.repeat(shared, 2) + 1, len(waves)]
    assert found.tolist() == waves
    # A pass is one turn.
    counters, stops, found = table._plan(False, threads)
    assert (counters[1, 0], stops.tolist(), len(found)) == (0, [7, 0], 0)


@njit
def lengths_of_all(columns, taken, numbers, adapt, found):
    lr, beta1, rest1, decay, low, high = numbers
    rest = beta1, rest1, decay, low, high, adapt
    for i in range(columns.shape[1]):
        x, m, g = columns[0, i], columns[1, i], columns[2, i]
        two = layerwise.lengths_of(x, m, g, taken[i], lr, rest)
        one = layerwise.lengths_of(x, m, None, taken[i], lr, rest)
        found[0, i], found[1, i], found[2, i] = two
        found[3, i], found[4, i], found[5, i] = one


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("adapt", [True, False])
def test_the_arithmetic_on_numbers_is_that_on_columns(adapt, dtype):
    special = [0.0, 1e-45, 1e-20, 1.0, 3e38, torch.inf, torch.nan]
    draw = torch.Generator().manual_seed(0)
    columns = torch.cat(
        [
            torch.tensor(list(itertools.product(special, repeat=3))).T,
            torch.rand(3, 5000, generator=draw) * 100,
        ],
        dim=1,
    ).to(dtype)
    taken = torch.rand(columns.shape[1], generator=draw) < 0.9
    numbers = [0.01, 0.9, 1 - 0.9, 0.1, 0.5, 3e4]
    kind = {torch.float32: np.float32, torch.float64: np.float64}[dtype]
    found = torch.zeros(6, columns.shape[1], dtype=dtype)
    given = tuple(map(kind, numbers))
    lengths_of_all(columns.numpy(), taken.numpy(), given, adapt, found.numpy())
    x, m, g = columns
    lr, *rest = *numbers, adapt
    rate = torch.full_like(x, lr)
    expected = [*lengths(x, m, g, taken, rate, rest)]
    expected += lengths(x, m, None, taken, rate, rest)
    # Three roots and two products, and torch's roots are off by a digit now and then.
    tolerance = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(
        found, torch.stack(expected), rtol=tolerance, atol=tolerance, equal_nan=True
    )
