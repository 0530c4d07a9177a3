"""Kernels for accelerators compile for them, which needs no such device."""

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
from steadygrad.kernels import triton_clipping, triton_lans, triton_lans_apply
from steadygrad.kernels import triton_parts, triton_scaled_adam, triton_sizes

KINDS = dict.fromkeys(("head", "groups", "rows", "chunks"), "*i64")
KINDS |= dict.fromkeys(("sums", "ready", "factors"), "*fp64") | {"flags": "*i32"}
KINDS |= dict.fromkeys(("start", "slots", "tensors"), "i32")

def assembled(kernel, **constants):
    names = kernel.arg_names
    signature = {name: KINDS.get(name, "constexpr") for name in names}
    tables = [i for i, name in enumerate(names) if signature[name][0] == "*"]
    aligned = {(i,): [["tt.divisibility", 16]] for i in tables}
    source = ASTSource(kernel, signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]

passes = [triton_lans.square_sums, triton_lans.lans_directions, triton_lans_apply.lans_apply]
passes += [triton_scaled_adam.scaled_adam_sums, triton_scaled_adam.scaled_adam_update]
types = [(tl.float32,) * 4, (tl.bfloat16, tl.float32, tl.float32, tl.bfloat16), (tl.float64,) * 4]
for grad, weight, state, param in types:
    for kernel in passes:
        kind = dict(grad=grad, weight=weight, state=state, param=param)
        ptx = assembled(kernel, **kind, whole=True, block=1024, aligned=True)
        # 16 bytes at a time, and nothing spilled to memory.
        assert re.search(r"ld\\.global\\.v[24]", ptx), kernel.__name__
        assert ".local" not in ptx, kernel.__name__
assembled(passes[1], **kind, whole=False, block=1024, aligned=False)
assembled(triton_parts.totals, first=1, count=3)
assembled(triton_sizes.learn_each, width=4, history=1, whole=True)
assembled(triton_clipping.clip_and_learn, width=4, history=128, whole=True)
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
