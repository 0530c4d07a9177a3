"""Triton's kernels compile for an accelerator, which needs no such device."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import re
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from steadygrad.kernels.triton import lamb, lans, runtime, scaled_adam
from steadygrad.kernels.triton.memory import read, read_gradient, write
from steadygrad.kernels.triton.passes import MOST_OPTIONS, pass_kernel

KINDS = dict.fromkeys(("addresses", "chunks", "bounds"), "*i64")
KINDS |= dict.fromkeys(("sums", "factors", "inverse_scale", "found"), "*fp64")

def assembled(kernel, **constants):
    # Options are of 64 bits whatever they are: they say so themselves.
    own = {p.name: p.annotation_type or "i32" for p in kernel.params}
    signature = {n: "constexpr" if n in constants else KINDS.get(n, own[n]) for n in own}
    tables = [i for i, name in enumerate(own) if signature[name][0] == "*"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in tables}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

options = [p for p in pass_kernel.params if p.annotation_type == "i64"]
assert len(options) == MOST_OPTIONS and all(p.do_not_specialize for p in options)
types = [(tl.float32,) * 4, (tl.bfloat16, tl.float32, tl.float32, tl.bfloat16), (tl.float64,) * 4]
for kind in types:
    typed = dict(zip(("grad", "weight", "state", "param"), kind))
    for kernel in {*lans.PASSES, *lamb.PASSES, *scaled_adam.PASSES}:
        name = kernel.body.__name__
        # A launch reads it, which raises where a local name is also that of a kernel's part.
        assert kernel.body.cache_key
        for aligned in (True, False):
            constants = dict(fields=5, block=1024, aligned=aligned, **typed, **kernel._asdict())
            ptx = assembled(pass_kernel, **constants)
            # As the profiler is to show it.
            assert f".entry {name}(" in ptx
            # 16 bytes at a time, and nothing spilled to memory.
            assert aligned == bool(re.search(r"ld\\.global\\.v[24]", ptx)), name
            assert ".local" not in ptx, name
# Another number of large states than two.
@triton.jit
def add(places, by, options, here):
    write(places[2], here, read(places[-2], here) + read_gradient(places[0], here, options[5]))
    return ()

for fields in (4, 6):
    constants = dict(fields=fields, block=1024, aligned=True, **typed)
    assembled(pass_kernel, **constants, **runtime.Pass(add, of_gradients=True)._asdict())
for KINDS["found"] in ("*fp32", "*fp64"):
    assembled(runtime.sum_kernel)
print("compiled")
"""


@pytest.mark.slow
def test_every_kernel_compiles(tmp_path):
    pytest.importorskip("triton", reason="triton is not installed")
    # A process of its own: this one interprets them.
    there = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    file = tmp_path / "compile_all.py"
    file.write_text(SCRIPT)
    done = subprocess.run([sys.executable, file], env=there, capture_output=True, text=True)
    assert done.stdout.strip() == "compiled", done.stderr[-3000:]
