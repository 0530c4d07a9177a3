"""Triton's kernels take the steps of multi-tensor calls: by its interpreter, on a CPU."""

import inspect
import os
import subprocess
import sys
from contextlib import nullcontext
from itertools import product

import numpy as np
import pytest
import torch

from steadygrad.optim import LAMB, LANS, ScaledAdam, batch, loops, passes
from tests.contracts.problems import (
    Watch,
    assert_rounded_alike,
    give_gradients,
    parameters,
    run,
    small_parameters_are_coded,  # noqa: F401
)
from tests.contracts.table import OPTIMIZERS

# Older interpreters do not get along with NumPy from 2.4 on.
pytest.importorskip("triton", "3.7", reason="triton 3.7 or newer is not installed")
if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("Triton compiles here: tests/gpu tries its kernels", allow_module_level=True)

from benchmarks.interpreted import converted
from triton.runtime import interpreter

from steadygrad.optim.checks import warn_once
from steadygrad.optim.kernels import check, codes, layerwise, memory, runtime, scaled_adam

F64, F32, BF16, F16, U8 = torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.uint8
CPU, DIFFERENCE = torch.device("cpu"), check.difference

# numpy warns where the interpreter divides by zero or overflows; what comes of it is not used.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _kernels_on_cpu(monkeypatch):
    """Gives CPU tensors to kernels, in chunks so small that some have two."""
    monkeypatch.setattr(interpreter, "_convert_float", converted)
    monkeypatch.setitem(passes.BACKENDS, "cpu", "kernels")
    monkeypatch.setattr(runtime, "CHUNK", 16)
    for name, empty in (("BROKEN", {}), ("_READY", set())):
        monkeypatch.setattr(loops, name, empty)
    monkeypatch.setattr(check, "difference", lambda *_: None)
    runtime.prepare.cache_clear()
    warn_once.cache_clear()
    yield
    runtime.prepare.cache_clear()


@pytest.fixture
def _checked(monkeypatch):
    """Kernels are checked, by sizes that take an interpreter no longer than they must."""
    monkeypatch.setattr(check, "difference", DIFFERENCE)
    monkeypatch.setattr(runtime, "CHUNK", 256)
    monkeypatch.setattr(runtime, "BLOCK", 256)


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
        ("lans-8bit", [F32, BF16]),
        ("scaled_adam-8bit", [F32, BF16]),
    ],
)
def test_a_model_of_several_types(name, types, monkeypatch):
    """A rate in a tensor, and what a gradient scaler leaves, are read without a wait."""
    # Random bits are those of a shard that begins elsewhere.
    monkeypatch.setattr(batch, "first_element", lambda p: 2**33 + 5)
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
    """Tensors with gaps, which is said."""
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    params = [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]
    optimizer = LANS(params, fused=True)
    with pytest.warns(UserWarning, match="strides"):
        run(optimizer, params, [0])
    assert with_kernels(optimizer) == [False, True]


WEIGHTS = [(F32, F32), (F32, BF16), (BF16, BF16), (F32, F16), (F16, F16)]
# Every type of gradients, masters or none; then numbers, beside codes and not, with gradients of
# the parameters' types.
TYPES = [(g, w, U8, p, F64) for g, (w, p) in product((F32, BF16, F16, F64), WEIGHTS)]
TYPES += [(p, w, F32, p, total) for (w, p), total in product(WEIGHTS, (F32, F64))]
TYPES += [(F64, F64, state, F64, F64) for state in (F32, F64)]


@pytest.mark.few(2)
@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("make", [LANS, LAMB, ScaledAdam])
@pytest.mark.parametrize("types", TYPES, ids=str)
def test_kernels_of_all_types_step_as_calls_do(make, types):
    """Whole and odd rows of codes, to the bit."""
    assert check.difference(make([torch.ones(1)]), types, CPU) is None


NUMBERS, MASTERS, CODES = (F32,) * 5, (BF16, F32, F32, BF16, F32), (F32, F32, U8, F32, F64)
FAULTS = [
    (LANS, NUMBERS, layerwise, "move_moments", "slope / d + decay * x", "slope / d"),
    (LANS, NUMBERS, layerwise, "_moved", "rest2 * (slope", "rest1 * (slope"),
    (LANS, NUMBERS, layerwise, "move_weights", "step += along_g * slope", "pass"),
    (LAMB, NUMBERS, layerwise, "move_weights", "enough * unbias2", "enough"),
    (ScaledAdam, NUMBERS, scaled_adam, "sums", "x * x)", "x)"),
    (ScaledAdam, NUMBERS, scaled_adam, "update", "return ((g.to", "return ((-g.to"),
    (ScaledAdam, NUMBERS, scaled_adam, "update", "+ size)", "- size)"),
    (LANS, NUMBERS, runtime, "sum_kernel", "offsets < count", "offsets < 1"),
    (LANS, NUMBERS, runtime, "pass_kernel", "static_range(2)", "static_range(1)"),
    (LANS, MASTERS, memory, "write_weight", "here, numbers)\n", "here, numbers * 0.999)\n"),
    (LAMB, MASTERS, memory, "read_gradient", "inverse_scale.to(wide.dtype)", "1"),
    (LANS, CODES, codes, "_decoded", "0.0 - number", "number"),
    (LAMB, CODES, codes, "_encode", "+ bits", "+ (1 << 19)"),
    (ScaledAdam, CODES, codes, "without_gaps", "< rest[:, None]", "< 9"),
    (ScaledAdam, CODES, scaled_adam, "update", "rest2 * (slope * slope)", "rest2 * slope"),
]


@pytest.mark.few(3)
@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[3]}: {fault[5]}".strip())
def test_kernels_with_a_fault_are_not_taken(fault, monkeypatch, tmp_path):
    """One warning, and multi-tensor calls by default and with `fused=True`."""
    make, types, module, name, right, wrong = fault
    source, file, scope = inspect.getsource(getattr(module, name).fn), tmp_path / "wrong.py", {}
    assert right in source
    file.write_text(source.replace(right, wrong))
    exec(compile(file.read_text(), file, "exec"), vars(module), scope)
    for user in (codes, layerwise, memory, runtime, scaled_adam):
        if hasattr(user, name):
            monkeypatch.setattr(user, name, scope[name])
    kind = "8bit" if types[2] is U8 else "float32"
    for fused in (None, True):
        p = torch.full((2, 300), 0.5, dtype=types[3], requires_grad=True)
        p.grad = torch.linspace(-1, 1, 600).view(2, 300).to(p.dtype)
        optimizer = make([p], fused=fused, state_dtype=kind)
        with pytest.warns(UserWarning, match="by kernels") if fused is None else nullcontext():
            optimizer.step()
        assert with_kernels(optimizer) == [False]


@pytest.mark.usefixtures("_checked")
@pytest.mark.parametrize("is_default", [True, False])
def test_a_check_leaves_nothing_behind(is_default, monkeypatch):
    """Kernels are the default where they are right; none are tried while a graph records."""
    monkeypatch.setattr(loops, "is_capturing", lambda: not is_default)
    p, q = (torch.ones(2, 3, requires_grad=True) for _ in "pq")
    ours, theirs = LANS([p]), LANS([q], foreach=True)
    p.grad = q.grad = torch.arange(6.0).view(2, 3)
    before = torch.get_rng_state()
    torch.set_default_dtype(F64)
    torch.set_default_device("meta")
    try:
        with nullcontext() if is_default else pytest.warns(UserWarning, match="graph records"):
            ours.step()
    finally:
        assert torch.get_default_dtype() is F64
        torch.set_default_dtype(F32)
        torch.set_default_device(None)
    theirs.step()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.is_grad_enabled()
    assert with_kernels(ours) == [is_default]
    assert len(loops._READY) == is_default
    assert not loops.BROKEN
    assert ours.skipped == 0
    assert_rounded_alike(ours, theirs)


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
    table = runtime.Table([5, 5, 5], NUMBERS, 2, (), range(3), CPU)
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
    table = runtime.Table([5, 0, 16 * 600 + 3, 40], NUMBERS, 2, (), (3, 0, 1, 2), CPU)
    drawn = torch.randn(table.partial_sums.shape, generator=torch.Generator().manual_seed(0))
    table.partial_sums.copy_(drawn)
    expected = [part.sum(1) for part in drawn.double().split([1, 1, 601, 3], dim=1)]
    found = torch.zeros(3, 4, dtype=F64)
    table.add_up(found)
    torch.testing.assert_close(found, torch.stack([*expected[1:], expected[0]], dim=1))


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

numbers, masters = (tl.float32,) * 4, (tl.bfloat16, tl.float32, tl.float32, tl.bfloat16)
types = [(*kind, total) for kind in (numbers, masters) for total in (tl.float32, tl.float64)]
types += [(tl.float64,) * 5, (tl.float32, tl.float32, tl.uint8, tl.float32, tl.float64)]
types += [(tl.bfloat16, w, tl.uint8, tl.bfloat16, tl.float64) for w in (tl.float32, tl.bfloat16)]
for kind in types:
    typed = dict(zip(("grad", "weight", "state", "param", "exact"), kind))
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
