"""Time of an optimizer's step on a CUDA device, over torch's AdamW(fused=True) in the same round.

Two GPTs, of 124 million and 1.3 billion parameters, and 1,000 and 3,000 small tensors, in float32,
and in bfloat16 with float32 masters; there AdamW steps float32 weights too and copies them into the
bfloat16 ones, as such training does by hand. The share of bandwidth is that of the bytes a rule
cannot help to move, over those of a copy on the device in the same run. Host time is that of a call
that finds the device idle and does not wait for it. Launches are counted by torch's profiler.
pytorch-optimizer's LAMB and torchao's eight-bit AdamW take part if they are installed. A set that
does not fit into the device's memory is left out, and said to be.

Run: python benchmarks/step_time_cuda.py [--sets 124M 1.3B 1000 3000] [--types float32 bfloat16]
    [--only LANS ScaledAdam] [--rounds 20] [--save]
"""

import argparse
import datetime
import gc
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from importlib import import_module
from statistics import median

import torch
from side_by_side import Timing, hardware, measure, save
from step_time import STEPS, gpt
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steadygrad.optim import LAMB, LANS, ScaledAdam

SETS: dict[str, list[tuple[int, ...]]] = {
    "124M": gpt(12, 768, 50257, 1024),
    "1.3B": gpt(24, 2048, 50257, 2048),
    "1000": [(64, 64)] * 1000,
    "3000": [(64, 64)] * 3000,
}
TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
RATE = 1e-9
Step = Callable[[], object]


def adamw(params: list[Tensor]) -> Step:
    """Torch's own, with masters where weights have 16 bits."""
    if params[0].dtype is torch.float32:
        return torch.optim.AdamW(params, lr=RATE, fused=True).step
    masters = [p.detach().float() for p in params]
    optimizer = torch.optim.AdamW(masters, lr=RATE, fused=True)

    def step() -> None:
        for master, p in zip(masters, params, strict=True):
            assert p.grad is not None
            master.grad = p.grad.float()
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, masters)

    return step


def muon(params: list[Tensor]) -> Step:
    """Torch's Muon for matrices, and AdamW for the rest, as it is meant to be used."""
    # Embeddings count as the rest: they come first.
    matrices = [p for p in params[2:] if p.ndim == 2]
    known = {id(p) for p in matrices}
    steps = [torch.optim.Muon(matrices, lr=RATE).step]
    rest = [p for p in params if id(p) not in known]
    steps += [adamw(rest)] if rest else []
    return lambda: [step() for step in steps]


def other(optimizer: Callable[..., torch.optim.Optimizer]) -> Callable[[list[Tensor]], Step]:
    """The maker of a peer's step."""
    return lambda p: optimizer(p, lr=RATE).step


MAKERS: dict[str, Callable[[list[Tensor]], Step]] = {
    "torch AdamW(fused=True)": adamw,
    "torch Muon": muon,
    "LANS(fused=True)": lambda p: LANS(p, lr=RATE, fused=True).step,
    "LAMB(fused=True)": lambda p: LAMB(p, lr=RATE, fused=True).step,
    "ScaledAdam(fused=True)": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0, fused=True).step,
    "LANS(foreach=True)": lambda p: LANS(p, lr=RATE, foreach=True).step,
    "ScaledAdam(foreach=True)": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0).step,
}
for module, peer in (("pytorch_optimizer", "Lamb"), ("torchao.optim", "AdamW8bit")):
    with suppress(ImportError):
        MAKERS[f"{module} {peer}"] = other(getattr(import_module(module), peer))
# Passes over the gradient, over weights and states in float32, and over 16-bit weights; see
# step_time.py. Others' floors are not known.
PASSES = {
    "torch AdamW": (1, 6, 1),
    "LANS": (3, 9, 2),
    "LAMB": (2, 9, 2),
    "ScaledAdam": (2, 6.25, 2),
}
# Bytes an element that the largest optimizer's states, masters and weights take, with a gradient.
STATE = 20


def parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Weights with gradients."""
    draw = torch.Generator(device).manual_seed(0)
    found = []
    for shape in shapes:
        p = torch.randn(shape, generator=draw, device=device).mul_(0.02).to(dtype)
        found.append(p.requires_grad_())
        p.grad = torch.randn(shape, generator=draw, device=device).mul_(0.01).to(dtype)
    return found


def least_bytes(key: str, dtype: torch.dtype) -> float | None:
    """Bytes that a rule cannot help to move for an element; None if that is not known."""
    passes = next((p for name, p in PASSES.items() if key.startswith(name)), None)
    if passes is None:
        return None
    gradient, wide, narrow = passes
    return gradient * dtype.itemsize + 4 * wide + (0 if dtype.itemsize == 4 else 2 * narrow)


def launches(step: Step) -> float:
    """Kernels and copies that a step starts on the device, the mean of four."""
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found = [event for event in seen.events() if event.device_type is DeviceType.CUDA]
    return len(found) / STEPS


def host_time(step: Step) -> float:
    """Seconds that a call takes on the host, the median of ten times the mean of a period."""
    found = []
    for _ in range(10):
        taken = 0.0
        for _ in range(STEPS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            taken += time.perf_counter() - start
        found.append(taken / STEPS)
    return median(found)


def extra_memory(step: Step) -> int:
    """Bytes that a step takes on the device beyond what it finds."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(STEPS):
        step()
    return torch.cuda.max_memory_allocated() - before


def timings(name: str, kind: str, makers: dict[str, Callable], rounds: int) -> list[str]:
    """The table of one set in one type."""
    size = sum(torch.Size(shape).numel() for shape in SETS[name])
    needed, free = STATE * size * len(makers), torch.cuda.mem_get_info()[0]
    if needed > free:
        gib = f"{needed / 2**30:.0f} GiB would be needed, {free / 2**30:.0f} GiB are free"
        return [f"{name}, {kind}: left out, {gib}. Remedy: --only LANS, one after the other.", ""]
    params = parameters(SETS[name], TYPES[kind], "cuda")
    steps = {key: make(params) for key, make in makers.items()}
    source, target = torch.ones(2, 2**28, device="cuda").unbind()
    found = measure(
        {**steps, "copy of 1 GiB": lambda: target.copy_(source)}, rounds=rounds, repeats=STEPS
    )
    copied = 2 * 4 * source.numel() / found["copy of 1 GiB"].seconds
    head = f"{name}, {kind}: {size / 1e6:.0f} M in {len(params)} tensors"
    columns = "ratio | quartiles | median ms | of a copy's bandwidth | host ms | launches | memory"
    lines = [f"| {head} | {columns} |", "|---|---|---|---|---|---|---|---|"]
    for key, step in steps.items():
        least = least_bytes(key, TYPES[kind])
        share = f"{least * size / found[key].seconds / copied:.0%}" if least else "not known"
        memory = extra_memory(step) / sum(p.numel() * p.element_size() for p in params)
        lines.append(row(key, found[key], share, host_time(step), launches(step), memory))
    rate = f"Copy {copied / 1e9:.0f} GB/s, read and written. Memory: added, of the weights'."
    return [*lines, "", rate, ""]


def row(key: str, t: Timing, share: str, host: float, count: float, memory: float) -> str:
    numbers = f"{t.ratio:.2f} | {t.low:.2f}-{t.high:.2f} | {1e3 * t.seconds:.2f}"
    return f"| {key} | {numbers} | {share} | {1e3 * host:.2f} | {count:.1f} | {memory:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--only", nargs="+", default=[""], help="beginnings of optimizers' names")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("Nothing was measured: it needs a CUDA device.")
        return
    # Everything is relative to the first.
    base, *others = MAKERS
    chosen = [base, *(key for key in others if key.startswith(tuple(args.only)))]
    makers = {key: MAKERS[key] for key in chosen}
    today = datetime.date.today().isoformat()
    lines = [f"# Time of a step on a GPU, {today}", "", f"{hardware('cuda')}.", ""]
    print("\n".join(lines))
    for name in args.sets:
        for kind in args.types:
            found = timings(name, kind, makers, args.rounds)
            print("\n".join(found), flush=True)
            lines += found
            gc.collect()
    if args.save:
        print(save("step-time-cuda", "\n".join(lines), today))


if __name__ == "__main__":
    main()
