"""What `gpu.py` measures, a part in each process; prints rows of Markdown.

The share of bandwidth is that of the bytes a rule cannot help to move, over those of a copy on the
device in the same run. In bfloat16 AdamW steps float32 weights too and copies them into the others,
as such training does by hand. Host time is that of a call that finds the device idle and does not
wait for it, with gradients that are new tensors at other addresses. Launches are the nodes of a
CUDA graph that has recorded a step: kernels and copies; its replay is a step without the host.

Run: python benchmarks/gpu_parts.py cuda step 124M float32
"""

import ctypes
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from statistics import median
from typing import Any

DEVICE = sys.argv[1]
if DEVICE == "cpu":  # before Triton is loaded
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
from side_by_side import Timing, hardware, measure  # noqa: E402
from step_time import RATE, STEPS, gpt, parameters  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from steadygrad.optim import LAMB, LANS, ScaledAdam, passes  # noqa: E402

SETS = {
    "23M": gpt(6, 512, 8192, 512),
    "124M": gpt(12, 768, 50257, 1024),
    "1000": [(64, 64)] * 1000,
}
SMALL = [(64, 64), (65, 64), (3000,), (5,)]
# Rounds and periods that are measured, seconds after which no round begins, elements of a copy.
ROUNDS, TURNS, SECONDS, COPIED = 20, 5, 6.0, 2**28
if DEVICE == "cpu":
    # The interpreter's own does not round to the nearest, which the optimizers' check would notice.
    from interpreted import converted
    from triton.runtime import interpreter

    interpreter._convert_float = converted
    torch.set_num_threads(1)
    passes.BACKENDS["cpu"] = "kernels"
    SETS = {"124M": [(64, 64), (4,)]}
    SMALL, STEPS = SETS["124M"], 1
    ROUNDS, TURNS, COPIED = 1, 1, 2**12
KINDS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.float32}
RULES = {
    "LANS": partial(LANS, lr=RATE),
    "LAMB": partial(LAMB, lr=RATE),
    "ScaledAdam": partial(ScaledAdam, lr=RATE, clipping_scale=2.0),
}
# At most so many times AdamW's time is wanted, and at least this share of a copy's bandwidth.
WANTED = {"LANS": 1.6, "LAMB": 1.6, "ScaledAdam": 1.5}
WANTED_8BIT, WANTED_SHARE = 1.2, 0.8
# Passes over the gradient, over weights in float32, over states, and over 16-bit weights.
PASSES = {
    "AdamW": (1, 2, 4, 1),
    "LANS": (3, 3, 6, 2),
    "LAMB": (2, 3, 6, 2),
    "ScaledAdam": (2, 2.25, 4, 2),
}


class MasterAdamW:
    """Torch's own with float32 masters of 16-bit weights, by hand."""

    def __init__(self, params: list[Tensor], **options: Any) -> None:
        self.params, self.masters = params, [p.detach().float() for p in params]
        self.optimizer = torch.optim.AdamW(self.masters, **options)

    def step(self) -> None:
        for master, p in zip(self.masters, self.params, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        self.optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(self.params, self.masters)


def makers(kind: str) -> dict[str, Callable[..., Any]]:
    """What makes each optimizer for a kind of weights and states; the first is the measure."""
    own = {"state_dtype": "8bit"} if kind == "8bit" else {}
    adamw = partial(MasterAdamW if kind == "bfloat16" else torch.optim.AdamW, lr=RATE)
    found = {"AdamW(fused=True)": partial(adamw, fused=True)}
    found |= {f"{k}(fused=True)": partial(rule, fused=True, **own) for k, rule in RULES.items()}
    if kind == "float32":
        for name, make in {"AdamW": adamw, **RULES}.items():
            found[f"{name}(foreach=True)"] = partial(make, foreach=True)
    return found


class Cpu:
    """A rehearsal's device: what only a GPU has is named and left out."""

    def wait(self) -> None:
        """Until the device has done all that was asked of it."""

    def memory(self, step: Callable[[], object]) -> float:
        """Most bytes that a step takes beyond what it finds."""
        step()
        return 0.0

    def graph(self, step: Callable[[], object]) -> tuple[int, Callable[[], object]]:
        """Launches of a step that is recorded, and its replay."""
        return 0, step


class Cuda(Cpu):
    """The device."""

    def wait(self) -> None:
        torch.cuda.synchronize()

    def memory(self, step: Callable[[], object]) -> float:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(STEPS):
            step()
        return torch.cuda.max_memory_allocated() - before

    def graph(self, step: Callable[[], object]) -> tuple[int, Callable[[], object]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        recorded = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(recorded):
            step()
        # The driver counts: torch's profiler saw no launches on one machine.
        raw, count = ctypes.c_void_p(recorded.raw_cuda_graph()), ctypes.c_size_t()
        code = ctypes.CDLL("libcuda.so.1").cuGraphGetNodes(raw, None, ctypes.byref(count))
        if code:
            raise RuntimeError(f"cuGraphGetNodes gave {code}")
        return count.value, recorded.replay


device = Cuda() if DEVICE == "cuda" else Cpu()


class Calls(TorchDispatchMode):
    """Counts calls of torch's operators, which kernels of Triton's are not among."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += 1
        return operator(*args, **(kwargs or {}))


def way(optimizer: Any) -> str:
    """How an optimizer that has taken a step takes it."""
    if not hasattr(optimizer, "_built"):
        return "torch"
    by = {"kernels" if batch.tables else "calls" for batch in optimizer._built}
    return " and ".join(sorted(by))


def share(name: str, kind: str, size: int, bandwidth: float) -> float:
    """Share of a bandwidth in bytes that the least traffic of a step takes."""
    gradient, weight, states, narrow = PASSES[name.partition("(")[0]]
    item = KINDS[kind].itemsize
    state = 1 if kind == "8bit" and not name.startswith("AdamW") else 4
    least = gradient * item + 4 * weight + state * states + (2 * narrow if item == 2 else 0)
    return least * size / bandwidth


def wanted(name: str, kind: str, ratio: float, found: float | None) -> str:
    """What is wanted of an optimizer in words, green or red."""
    rule, _, mode = name.partition("(")
    if rule not in WANTED or "fused" not in mode:
        return ""
    most = WANTED_8BIT if kind == "8bit" else WANTED[rule]
    said = [f"at most {most}: {'green' if ratio <= most else 'red'}"]
    if found is not None:
        said += [f"{WANTED_SHARE:.0%}: {'green' if found >= WANTED_SHARE else 'red'}"]
    return ", ".join(said)


def host_time(step: Callable[[], object], params: list[Tensor]) -> float:
    """Seconds that a call takes on the host, the median of periods."""
    sets, found = [[p.grad for p in params], [p.grad.clone() for p in params]], []
    for _ in range(TURNS):
        taken = 0.0
        for _ in range(STEPS):
            sets.reverse()
            for p, gradient in zip(params, sets[0], strict=True):
                p.grad = gradient.detach()
            device.wait()
            start = time.perf_counter()
            step()
            taken += time.perf_counter() - start
        found.append(taken / STEPS)
    device.wait()
    return median(found)


def machine() -> None:
    """The machine's line, or an error where there is no such device."""
    torch.ones(1, device=DEVICE).sum().item()
    print(hardware(DEVICE))


def copying(count: int = COPIED) -> tuple[Callable[[], object], int]:
    """A copy on the device, and its bytes, read and written."""
    source, target = torch.ones(2, count, device=DEVICE).unbind()
    return lambda: target.copy_(source), 8 * count


def step(name: str, kind: str) -> None:
    """The time of a step of each optimizer, in turns."""
    params = parameters(SETS[name], KINDS[kind], DEVICE)
    size = sum(p.numel() for p in params)
    made = {key: make(params) for key, make in makers(kind).items()}
    copy, moved = copying()
    steps = {**{key: one.step for key, one in made.items()}, "copy": copy}
    found = measure(steps, rounds=ROUNDS, repeats=STEPS, seconds=SECONDS)
    bandwidth = moved / found["copy"].seconds
    head = f"{name}, {kind}: {size / 1e6:.0f} M in {len(params)} tensors"
    more = "of a copy's bandwidth | wanted | host ms | memory added"
    print(f"| {head} | by | ratio | quartiles | median ms | {more} |\n{'|---' * 9}|")
    for key, one in made.items():
        t: Timing = found[key]
        part = share(key, kind, size, bandwidth) / t.seconds
        # A set that fits a cache says nothing of bandwidth.
        want = wanted(key, kind, t.ratio, None if name == "1000" else part)
        numbers = f"{t.ratio:.2f} | {t.low:.2f}-{t.high:.2f} | {1e3 * t.seconds:.3f} | {part:.0%}"
        host, own = host_time(one.step, params), sum(p.numel() * p.element_size() for p in params)
        rest = f"{1e3 * host:.3f} | {device.memory(one.step) / own:.1%}"
        print(f"| {key} | {way(one)} | {numbers} | {want} | {rest} |")
    print(f"- Copy: {bandwidth / 1e9:.0f} GB/s, read and written. Memory: of the weights'.")


def ways() -> None:
    """Which way each optimizer takes, and how far kernels are from multi-tensor calls."""
    print(f"| optimizer, kind | default | fused=True | apart from calls | warned |\n{'|---' * 5}|")
    for rule, make in RULES.items():
        for kind, dtype in KINDS.items():
            own = {"lr": 0.01, **({"state_dtype": "8bit"} if kind == "8bit" else {})}
            taken, weights = [], []
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for mode in ({}, {"fused": True}, {"foreach": True}):
                    params = parameters(SMALL, dtype, DEVICE)
                    optimizer = make(params, **own, **mode)
                    # In the first step moments are zero: it shows no fault of what is kept of them.
                    for _ in range(3):
                        optimizer.step()
                    taken.append(way(optimizer))
                    # Masters have the digits that 16-bit weights lose.
                    own_weights = [optimizer.state[p].get("master_weight", p) for p in params]
                    weights.append(torch.cat([w.detach().flatten().double() for w in own_weights]))
            apart = float((weights[1] - weights[2]).abs().max() / weights[2].abs().max())
            said = {str(one.message).replace("|", "/")[:120] for one in caught} or {"nothing"}
            row = f"{taken[0]} | {taken[1]} | {apart:.1e} | {'; '.join(sorted(said))}"
            print(f"| {rule}, {kind} | {row} |")


def graph(name: str) -> None:
    """Launches of a step, and its time without the host."""
    copy, moved = copying()
    bandwidth = moved / measure({"copy": copy}, rounds=ROUNDS, repeats=STEPS)["copy"].seconds
    head = f"{name} | calls of operators | launches | replay ms | of a copy's bandwidth"
    print(f"| {head} |\n{'|---' * 5}|")
    for kind in KINDS:
        params = parameters(SETS[name], KINDS[kind], DEVICE)
        size = sum(p.numel() for p in params)
        for key, make in makers(kind).items():
            try:
                one = make(params, capturable=True)
                one.step()
                with Calls() as calls:
                    one.step()
                count, replay = device.graph(one.step)
                timing = {"replay": replay}
                t = measure(timing, rounds=ROUNDS, repeats=STEPS, seconds=1.0)["replay"].seconds
                part = share(key, kind, size, bandwidth) / t
                row = f"{calls.count} | {count} | {1e3 * t:.3f} | {part:.0%}"
            except Exception as error:
                row = f"{type(error).__name__}: {' '.join(str(error).split())[:150]} | | |"
            print(f"| {key}, {kind} | {row} |")
            one = replay = None
    print("- Launches: nodes of a CUDA graph of one step, counted by the driver.")


def first(rule: str, kind: str) -> None:
    """Seconds of a process's first step, Triton's import and compilation included."""
    params = parameters([(64, 64)], KINDS[kind], DEVICE)
    optimizer = makers(kind)[f"{rule}(fused=True)"](params)
    device.wait()
    start = time.perf_counter()
    optimizer.step()
    device.wait()
    print(f"{time.perf_counter() - start:.2f}")


def compile() -> None:  # noqa: A001 - a part's name
    """The first step of a process each, with Triton's cache empty, and full."""
    print(f"| first step | empty cache, s | full cache, s |\n{'|---' * 3}|")

    def row(rule: str, kind: str) -> str:
        command = [sys.executable, __file__, DEVICE, "first", rule, kind]
        with tempfile.TemporaryDirectory() as folder:
            own = {**os.environ, "TRITON_CACHE_DIR": folder}
            given = {"env": own, "capture_output": True, "text": True}
            runs = [subprocess.run(command, **given) for _ in range(2)]
        ends = [r.stderr.splitlines()[-1:] if r.returncode else r.stdout.split() for r in runs]
        return f"| {rule}, {kind} | {' | '.join(' '.join(end[-1:])[:100] for end in ends)} |"

    pairs = [(rule, kind) for kind in KINDS for rule in PASSES]
    with ThreadPoolExecutor(4) as pool:
        for line in pool.map(lambda pair: row(*pair), pairs[1:2] if DEVICE == "cpu" else pairs):
            print(line)


PARTS = {one.__name__: one for one in (machine, step, ways, graph, first, compile)}

if __name__ == "__main__":
    PARTS[sys.argv[2]](*sys.argv[3:])
