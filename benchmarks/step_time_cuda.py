"""Time of an optimizer's step on a CUDA device, over torch's AdamW(fused=True) in the same round.

Two GPTs, of 124 million and 1.3 billion parameters, in float32, and in bfloat16 with float32
masters; there AdamW steps float32 weights too and copies them into the bfloat16 ones, as such
training does by hand. The share of bandwidth is that of the bytes a rule cannot help to move, over
those of a copy on the device in the same run. Launches are counted by torch's profiler.

Run: python benchmarks/step_time_cuda.py [--sets 124M 1.3B] [--types float32 bfloat16]
    [--rounds 20] [--save]
"""

import argparse
import datetime
import gc
from collections.abc import Callable, Iterable

import torch
from side_by_side import Timing, hardware, measure, save
from step_time import STEPS, gpt
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steadygrad.optim import LANS, ScaledAdam

SETS = {"124M": gpt(12, 768, 50257, 1024), "1.3B": gpt(24, 2048, 50257, 2048)}
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


MAKERS: dict[str, Callable[[list[Tensor]], Step]] = {
    "torch AdamW(fused=True)": adamw,
    "LANS(fused=True)": lambda p: LANS(p, lr=RATE, fused=True).step,
    "ScaledAdam(fused=True)": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0, fused=True).step,
}
# Passes over the gradient, over weights and states in float32, and over 16-bit weights; see
# step_time.py.
PASSES = {"torch AdamW": (1, 6, 1), "LANS": (3, 9, 2), "ScaledAdam": (2, 6.25, 2)}


def parameters(shapes: Iterable[tuple[int, ...]], dtype: torch.dtype, device: str) -> list[Tensor]:
    """Weights with gradients."""
    draw = torch.Generator(device).manual_seed(0)
    found = []
    for shape in shapes:
        p = torch.randn(shape, generator=draw, device=device).mul_(0.02).to(dtype)
        found.append(p.requires_grad_())
        p.grad = torch.randn(shape, generator=draw, device=device).mul_(0.01).to(dtype)
    return found


def least_bytes(key: str, dtype: torch.dtype) -> float:
    """Bytes that a rule cannot help to move for an element."""
    gradient, wide, narrow = next(p for name, p in PASSES.items() if key.startswith(name))
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


def extra_memory(step: Step) -> int:
    """Bytes that a step takes on the device beyond what it finds."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(STEPS):
        step()
    return torch.cuda.max_memory_allocated() - before


def timings(name: str, kind: str, rounds: int) -> list[str]:
    """The table of one set in one type."""
    params = parameters(SETS[name], TYPES[kind], "cuda")
    size = sum(p.numel() for p in params)
    steps = {key: make(params) for key, make in MAKERS.items()}
    source, target = torch.ones(2, 2**28, device="cuda").unbind()
    found = measure(
        {**steps, "copy of 1 GiB": lambda: target.copy_(source)}, rounds=rounds, repeats=STEPS
    )
    copied = 2 * 4 * source.numel() / found["copy of 1 GiB"].seconds
    head = f"{name}, {kind}: {size / 1e6:.0f} M in {len(params)} tensors"
    lines = [
        f"| {head} | ratio | quartiles | median ms | of a copy's bandwidth | launches | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, step in steps.items():
        share = least_bytes(key, TYPES[kind]) * size / found[key].seconds / copied
        memory = extra_memory(step) / sum(p.numel() * p.element_size() for p in params)
        lines.append(row(key, found[key], share, launches(step), memory))
    rate = f"Copy {copied / 1e9:.0f} GB/s, read and written. Memory: added, of the weights'."
    return [*lines, "", rate, ""]


def row(key: str, t: Timing, share: float, count: float, memory: float) -> str:
    numbers = f"{t.ratio:.2f} | {t.low:.2f}-{t.high:.2f} | {1e3 * t.seconds:.2f}"
    return f"| {key} | {numbers} | {share:.0%} | {count:.1f} | {memory:.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--types", nargs="+", choices=TYPES, default=list(TYPES))
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("Nothing was measured: it needs a CUDA device.")
        return
    today = datetime.date.today().isoformat()
    lines = [f"# Time of a step on a GPU, {today}", "", f"{hardware('cuda')}.", ""]
    for name in args.sets:
        for kind in args.types:
            lines += timings(name, kind, args.rounds)
            gc.collect()
    text = "\n".join(lines)
    print(text)
    if args.save:
        print(save("step-time-cuda", text, today))


if __name__ == "__main__":
    main()
