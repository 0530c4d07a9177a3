"""Triton's kernels take the steps of multi-tensor calls: by its interpreter, on a CPU."""

import os
import subprocess
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch

from steadygrad.optim import LANS, loops, passes
from tests.contracts.problems import (
    Watch,
    assert_rounded_alike,
    give_gradients,
    parameters,
    run,
)
from tests.contracts.table import OPTIMIZERS

# Older interpreters do not get along with NumPy from 2.4 on.
pytest.importorskip("triton", "3.7", reason="triton 3.7 or newer is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles here: tests/gpu tries its kernels", allow_module_level=True)

import triton.language as tl
from triton.runtime import interpreter

from steadygrad.optim.kernels import runtime

# numpy warns where the interpreter divides by zero or overflows; what comes of it is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _converted(numbers, given, wanted, mode):
    """The interpreter's own does not round to the nearest."""
    kinds = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16}
    source = torch.from_numpy(np.ascontiguousarray(numbers))
    bits = {tl.float32: torch.int32, tl.bfloat16: torch.uint16}[wanted]
    return source.view(kinds[given]).to(kinds[wanted]).view(bits).numpy()


@pytest.fixture(autouse=True)
def _kernels_on_cpu(monkeypatch):
    """Gives CPU tensors to kernels, in chunks so small that some have two."""
    monkeypatch.setattr(interpreter, "_convert_float", _converted)
    monkeypatch.setitem(passes.BACKENDS, "cpu", "kernels")
    monkeypatch.setattr(runtime, "CHUNK", 16)
    monkeypatch.setattr(loops, "BROKEN", {})
    monkeypatch.setattr(loops, "_WARNED", set())
    runtime._prepare.cache_clear()
    yield
    runtime._prepare.cache_clear()


def with_kernels(optimizer):
    return [bool(batch.tables) for batch in optimizer._built]


def mixed(types):
    """Parameters of some types, one of them frozen, some without gradients at times."""
    groups = [parameters(dtype)[:5:2] + parameters(dtype)[1:2] for dtype in types]
    params = [p for group in groups for p in group]
    params[2].requires_grad_(False)
    return params


# Of each kernel the variant with the most options.
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "types"),
    [
        ("lans-bounded", [torch.float32, torch.bfloat16, torch.float16, torch.float64]),
        # A norm over all gradients brings the roundings of narrow types to float64.
        ("lamb-nvidia", [torch.float32, torch.float16]),
        ("scaled_adam-clipped", [torch.float32, torch.bfloat16]),
    ],
)
def test_a_model_of_several_types(name, types):
    """A rate in a tensor, and what a gradient scaler leaves, are read without a wait."""
    entry = OPTIMIZERS[name]
    ours, theirs, rate = mixed(types), mixed(types), torch.tensor(0.01)
    groups = [[{"params": p[::2]}, {"params": p[1::2], "lr": 0.004}] for p in (ours, theirs)]
    one, two = entry(groups[0], lr=rate, fused=True), entry(groups[1], foreach=True)
    one.found_inf, one.grad_scale = torch.zeros(()), torch.tensor(4.0)
    for step in range(6):
        rate.fill_(0.01 / (1 + step))
        two.param_groups[0]["lr"] = float(rate)
        for params, optimizer in ((ours, one), (theirs, two)):
            give_gradients(params, step)
            params[2].grad = None
            if step == 3:
                params[0].grad[1, 1] = torch.inf
            if step == 4:
                params[4].data[0, 0] = 0.75  # written from outside: a master must follow
            if step == 5:  # memory that moves, and a gradient in another order
                optimizer.load_state_dict(optimizer.state_dict())
                params[0].data = params[0].detach().clone()
                params[0].grad = params[0].grad.t().contiguous().t()
            for p in params if optimizer is one else ():
                p.grad = None if p.grad is None else p.grad * 4
            is_watched = optimizer is one and step == 1
            with Watch() if is_watched else nullcontext() as watch:
                optimizer.step()
            assert not is_watched or watch.waits == []
    assert all(with_kernels(one))
    assert one.skipped == two.skipped == 1
    assert_rounded_alike(one, two)
    for p in ours:
        if "master_weight" in one.state[p]:
            assert torch.equal(p.detach(), one.state[p]["master_weight"].to(p.dtype))


def test_what_kernels_cannot_take_goes_by_calls():
    """Moments in eight bits, and tensors with gaps, which is said."""
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    params = [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]
    optimizer = LANS(params, fused=True)
    with pytest.warns(UserWarning, match="strides"):
        run(optimizer, params, [0])
    assert with_kernels(optimizer) == [False, True]
    large = torch.ones(64, 1024, requires_grad=True)
    large.grad = torch.ones_like(large)
    optimizer = LANS([large], fused=True, state_dtype="8bit")
    with pytest.warns(UserWarning, match="eight bits"):
        optimizer.step()
    assert optimizer.state[large]["exp_avg"].dtype is torch.uint8
    assert with_kernels(optimizer) == [False]


def filled(table, grads, rest):
    given = [0 if g is None else g.data_ptr() for g in grads], *(2 * [[t.data_ptr() for t in rest]])
    table.fill_states((rest, rest))
    table.fill(np.array(given), np.array([g is not None for g in grads]))
    return table.device_addresses[:, 0].tolist()


def test_graphs_have_addresses_that_later_steps_leave_alone(monkeypatch):
    """No CPU has a graph that records: it is said here."""
    recording = [False]
    monkeypatch.setattr(runtime, "is_capturing", lambda: recording[0])
    monkeypatch.setattr(runtime, "_RECORDED", [])
    table = runtime.Table([5, 5, 5], (torch.float32,) * 4, 2, torch.device("cpu"))
    sets = [torch.zeros(3, 5).unbind() for _ in range(runtime.SPARES + 3)]
    rest, plain, *static = sets
    own = filled(table, plain, rest)
    recording[0] = True
    filled(table, static[0], rest)
    graph, places = table.device_addresses, [t.data_ptr() for t in static[0]]
    for grads in static[1:-1]:
        filled(table, grads, rest)
    with pytest.raises(RuntimeError, match="recorded steps"):
        filled(table, static[-1], rest)
    recording[0] = False
    assert filled(table, [None, *plain[1:]], rest) == [0, *own[1:]]
    assert graph[:, 0].tolist() == places
    recording[0] = True
    filled(table, static[-1], rest)
    assert [one is table for one, _ in runtime._RECORDED] == [True] * (runtime.SPARES + 1)


def test_sums_of_tensors_are_those_of_their_chunks():
    """Also of an empty one, and of one with more chunks than are added up side by side."""
    table = runtime.Table([5, 0, 16 * 600 + 3, 40], (torch.float32,) * 4, 2, torch.device("cpu"))
    drawn = torch.randn(table.partial_sums.shape, generator=torch.Generator().manual_seed(0))
    table.partial_sums.copy_(drawn)
    expected = [part.sum(1) for part in drawn.double().split([1, 1, 601, 3], dim=1)]
    torch.testing.assert_close(table.sums(3, torch.float64), torch.stack(expected, dim=1))


COMPILED = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from steadygrad.optim.kernels.runtime import pass_kernel, sum_kernel
from steadygrad.optim.layerwise_rule import LAMB_PASSES, LANS_PASSES
from steadygrad.optim.passes import named
from steadygrad.optim.scaled_adam_rule import sums, update

KINDS = dict.fromkeys(("addresses", "chunks", "ends"), "*i64")
KINDS |= dict.fromkeys(("sums", "factors", "inverse_scale", "found"), "*fp64")

def assembled(kernel, **constants):
    # Options are of 64 bits whatever they are: they say so themselves.
    own = {p.name: p.annotation_type or "i32" for p in kernel.params}
    signature = {n: "constexpr" if n in constants else KINDS.get(n, own[n]) for n in own}
    tables = [i for i, name in enumerate(own) if signature[name][0] == "*"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in tables}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    target, options = GPUTarget("cuda", 90, 32), dict(enable_fp_fusion=False)
    return triton.compile(source, target=target, options=options).asm["ptx"]

types = [(tl.float32,) * 4, (tl.bfloat16, tl.float32, tl.float32, tl.bfloat16), (tl.float64,) * 4]
types += [(tl.float32, tl.float32, tl.uint8, tl.float32)]
types += [(tl.bfloat16, weight, tl.uint8, tl.bfloat16) for weight in (tl.float32, tl.bfloat16)]
for kind in types:
    typed = dict(zip(("grad", "weight", "state", "param"), kind))
    fields = 7 if kind[2] == tl.uint8 else 5
    for one in [*LANS_PASSES[:3], *LAMB_PASSES[1:3], sums, update]:
        body = named(one.kernel)
        # A launch reads it, which raises where a local name is also that of a kernel's part.
        assert body.cache_key
        own = dict(body=body, columns=one.columns, rows=one.rows, has_two=one.constants == (True,))
        for aligned in (True, False):
            ptx = assembled(pass_kernel, fields=fields, block=1024, aligned=aligned, **typed, **own)
            # 16 bytes at a time, and nothing spilled to memory.
            assert aligned == bool(re.search(r"ld\\.global\\.v[24]", ptx)), one.kernel
            assert ".local" not in ptx, one.kernel
            # Each operation is rounded by itself, and what goes into codes to the last digit.
            assert "fma.rn.f32" not in ptx, one.kernel
            if one is update:
                assert not re.search(r"(sqrt|div)\\.(approx|full)", ptx), one.kernel
for KINDS["found"] in ("*fp32", "*fp64"):
    assembled(sum_kernel)
print("compiled")
"""


@pytest.mark.slow
def test_every_kernel_compiles_for_a_device(tmp_path):
    # A process of its own: this one interprets them.
    there = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    file = tmp_path / "compile_all.py"
    file.write_text(COMPILED)
    done = subprocess.run([sys.executable, file], env=there, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
