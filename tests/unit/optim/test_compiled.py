"""Passes that torch compiles, as on CUDA devices; here by the same compiler's C++."""

import shutil

import pytest
import torch

from steadygrad.optim import LANS, batch, passes
from tests.contracts.problems import tensors_of
from tests.contracts.table import OPTIMIZERS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler here"),
]
every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
SHAPES = [(40, 7), (5,), (1,), (), (3, 2, 2), (9, 40)]


@pytest.fixture
def compiled(monkeypatch):
    """Has `fused=True` compile; counts the functions that were made."""
    monkeypatch.setattr(batch, "COMPILED", {"cpu"})
    passes._compiled.cache_clear()
    torch._dynamo.reset()
    yield
    passes._compiled.cache_clear()


def trained(entry, dtype, **mode):
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(s, generator=draw).to(dtype).requires_grad_() for s in SHAPES]
    optimizer = entry(params, **mode)
    for step in range(6):
        for i, p in enumerate(params):
            p.grad = torch.randn(p.shape, generator=draw).to(dtype)
            if (step + i) % 5 == 0:
                p.grad = None
        if step == 3:
            params[0].grad = torch.full(SHAPES[0], float("nan"), dtype=dtype)
        optimizer.step()
    return optimizer


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("compiled")
def test_compiled_steps_are_those_of_multi_tensor_calls(entry, dtype):
    found, expected = (trained(entry, dtype, **{m: True}) for m in ("fused", "foreach"))
    assert all(one.compiled for one in found._built)
    assert found.skipped == expected.skipped == 1
    for (name, a), (_, b) in zip(tensors_of(found), tensors_of(expected), strict=True):
        # Sums in another order, and products that are fused with sums.
        rounding = 1e-5 if a.dtype is torch.float32 else 0.01
        torch.testing.assert_close(a, b, rtol=rounding, atol=1e-6, msg=name)


@pytest.mark.usefixtures("compiled")
def test_as_many_graphs_for_few_tensors_as_for_many():
    counts = []
    for count in (4, 40):
        torch._dynamo.reset()
        passes._compiled.cache_clear()
        torch._dynamo.utils.counters.clear()
        params = [torch.ones(3 + i, 5).requires_grad_() for i in range(count)]
        optimizer = LANS(params, fused=True)
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer.step()
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert counts[0] == counts[1] <= 6
