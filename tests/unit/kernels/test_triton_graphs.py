"""Memory that a CUDA graph has recorded is not freed while the optimizer lives.

No CPU records: a test says when it is as if one did.
"""

import gc
import weakref

import pytest
import torch

from tests.contracts.problems import give_gradients, parameters, run
from tests.contracts.table import OPTIMIZERS
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("interpreter")
NAMES = ["lans-bounded", "lamb", "scaled_adam-clipped"]
every_optimizer = pytest.mark.parametrize("entry", [OPTIMIZERS[n] for n in NAMES], ids=NAMES)
MODES = [{"fused": True}, {"foreach": True}]
ADDRESSED = ("_own", "device_chunks", "device_sums", "_bounds")


@pytest.fixture
def recording(monkeypatch):
    from steadygrad.kernels.triton import runtime
    from steadygrad.optim import batch, building

    now = [False]
    for module in (runtime, batch, building):
        monkeypatch.setattr(module, "is_recording", lambda device: now[0])
    return now


def memory_of(optimizer):
    """Weak references to all memory that kernels of a step are handed, gradients aside."""
    tensors = []
    for batch in optimizer._built:
        tensors += [*batch.columns.values(), batch.numel, batch.index]
        tensors += [t for states in batch.moments for t in states]
        tensors += [t for state in batch.states for t in state.values()]
        if batch.table is not None:
            tensors += [getattr(batch.table, name) for name in ADDRESSED]
            tensors += [t for pair in batch.table._recorded for t in pair]
    return [weakref.ref(t.untyped_storage()) for t in tensors if t.numel()]


def other_gradients(optimizer, params):
    give_gradients(params, 4, none=False)
    for p in params:
        p.grad_dtype = None
        p.grad = p.grad.float()
    optimizer.step()
    for p in params:
        p.grad = None


CHANGES = {
    "a state dict": lambda o, params: o.load_state_dict(o.state_dict()),
    "a group": lambda o, params: o.add_param_group({"params": [torch.ones(3, requires_grad=True)]}),
    "gradients of another type": other_gradients,
    "masters given up": lambda o, params: o.param_groups[0].update(master_weights=False),
    "a count exchanged": lambda o, params: o.state[params[0]].update(step=torch.zeros(())),
}


# Multi-tensor calls take gradients of another type as they are.
CASES = [(m, c) for m in MODES for c in CHANGES if "fused" in m or c != "gradients of another type"]


@pytest.mark.slow
@covering(
    entry={name: OPTIMIZERS[name] for name in NAMES},
    case=CASES,
    records={"recorded": True, "not recorded": False},
)
def test_memory_of_a_recorded_step_is_kept(entry, case, records, recording):
    mode, change = case
    params = parameters(torch.bfloat16)[1:4]
    optimizer = entry(params, **mode, capturable=True)
    run(optimizer, params, range(2), none=False)
    recording[0] = records
    run(optimizer, params, [2], none=False)
    recording[0] = False
    assert all(batch.recorded == records for batch in optimizer._built)
    built, memory = optimizer._built, memory_of(optimizer)
    assert len(memory) > 15
    CHANGES[change](optimizer, params)
    run(optimizer, params, [3], none=False)
    assert not {*map(id, optimizer._built)} & {*map(id, built)}
    del built
    gc.collect()
    freed = sum(ref() is None for ref in memory)
    assert (freed == 0) == records
    assert optimizer.skipped == 0


@every_optimizer
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_nothing_is_kept_where_nothing_changes(entry, mode, recording):
    params = parameters()[1:4]
    optimizer = entry(params, **mode, capturable=True)
    run(optimizer, params, range(2), none=False)
    for step in range(2, 8):
        recording[0] = step % 2 == 0
        for p in params:
            p.grad.fill_(0.5)
        optimizer.step()
    assert len(optimizer._recorded) == 0
    # Nor where a gradient comes or goes.
    params[0].grad = None
    optimizer.step()
    assert len(optimizer._recorded) == 0
    assert optimizer.state[params[1]]["step"] == 9


@every_optimizer
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_nothing_is_built_while_a_graph_records(entry, mode, recording):
    params = parameters()[1:4]
    optimizer = entry(params, **mode, capturable=True)
    give_gradients(params, 0, none=False)
    before = [p.detach().clone() for p in params]
    recording[0] = True
    with pytest.raises(RuntimeError, match=r"a step outside of CUDA graphs before.*take one first"):
        optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(params, before, strict=True))
