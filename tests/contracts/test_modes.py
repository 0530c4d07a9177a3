"""The modes of a step compute the same, and the fast ones need little memory."""

import pytest
import torch

from steadygrad import kernels
from tests.contracts.problems import (
    PeakMemory,
    assert_same,
    give_gradients,
    parameters,
    run,
    tensors_of,
)
from tests.contracts.table import OPTIMIZERS

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
whatever_mode = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@whatever_mode
@every_type
def test_foreach_equals_single(entry, dtype):
    together, alone = parameters(dtype), parameters(dtype)
    run(entry(together, foreach=True), together, range(12))
    run(entry(alone, foreach=False), alone, range(12))
    assert_same(together, alone)


@whatever_mode
@every_type
def test_fused_equals_foreach_but_for_rounding(entry, dtype):
    kernels, calls = parameters(dtype), parameters(dtype)
    ours, theirs = entry(kernels, fused=True), entry(calls, foreach=True)
    run(ours, kernels, range(12))
    run(theirs, calls, range(12))
    pairs = zip(tensors_of(ours), tensors_of(theirs), strict=True)
    for (name, a), (_, b) in pairs:
        # Sums in another order, products before quotients: some roundings of the state's type.
        # What cancels, as inner products do, keeps the rounding of its largest term.
        exact = a.dtype is torch.float64 and not name.startswith("model_norm")  # of float32
        rounding = 1e-12 if exact else 1e-5
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, msg=name)


def peak_memory(entry, dtype, **mode):
    shapes = [(256, 256), *[(64, 64)] * 40]
    params = [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]
    optimizer = entry(params, **mode)
    for step in range(3):
        give_gradients(params, step, none=False)
        with PeakMemory() as memory:
            optimizer.step()
    return memory.peak


@whatever_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_memory_is_two_temporaries_of_the_largest(entry, dtype):
    largest = 256 * 256 * 4
    # Besides them, some numbers for each parameter.
    assert largest < peak_memory(entry, dtype, foreach=True) <= 2 * largest + 64 * 1024


@whatever_mode
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_loops_need_some_numbers_for_each_parameter(entry, dtype):
    # 41 of them; no temporary of a parameter's size.
    assert 0 < peak_memory(entry, dtype, fused=True) <= 41 * 1024


@whatever_mode
def test_fused_falls_back_with_one_warning(entry, monkeypatch):
    monkeypatch.setattr(kernels, "missing", lambda: "numba is not installed")
    kernels._WARNED.clear()
    fused, default, plain = parameters(), parameters(), parameters()
    optimizer = entry(fused, fused=True)
    with pytest.warns(UserWarning, match=r"fused kernel.*numba is not installed.*Remedy") as caught:
        run(optimizer, fused, range(5))
    assert len(caught) == 1
    run(entry(default), default, range(5))  # who asks for nothing is told nothing
    run(entry(plain, foreach=True), plain, range(5))
    assert_same(fused, plain)
    assert_same(default, plain)
