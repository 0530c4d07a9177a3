"""Time of an optimizer's step, side by side, over torch's AdamW(fused=True) in the same round.

Sets of float32 parameters: GPTs of 23, 124 and 350 million, 1,000 tensors of 1,000 to 10,000
elements, and "host", 148 of 64, whose step is the host's time with one thread. A timing is the mean
of four steps, because ScaledAdam learns sizes in every fourth. The share of the floor is the time
that the bytes a rule cannot help to move take at the bandwidth of a sum in place in the same run,
over the time it takes. All variants share weights and gradients. pytorch-optimizer's LAMB and the
eight-bit AdamW of bitsandbytes and torchao take part if they are installed.

Run: python benchmarks/step_time.py [--sets 23M 124M small 350M host] [--rounds 12] [--threads 2]
    [--only fused=True AdamW8bit] [--save]
"""

import argparse
import datetime
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
from side_by_side import Timing, hardware, measure, save
from torch import Tensor

from steadygrad.optim import LAMB, LANS, ScaledAdam

STEPS = 4


def gpt(layers: int, width: int, vocabulary: int, context: int) -> list[tuple[int, ...]]:
    """Shapes of a GPT-2 with these numbers, its output tied to its embedding."""
    norm: list[tuple[int, ...]] = [(width,), (width,)]
    block = [*norm, (3 * width, width), (3 * width,), (width, width), (width,)]
    block += [*norm, (4 * width, width), (4 * width,), (width, 4 * width), (width,)]
    return [(vocabulary, width), (context, width), *(block * layers), *norm]


def small() -> list[tuple[int, ...]]:
    draw = torch.Generator().manual_seed(0)
    return [(n,) for n in torch.randint(1000, 10001, (1000,), generator=draw).tolist()]


SETS = {"23M": gpt(6, 512, 8192, 512), "124M": gpt(12, 768, 50257, 1024), "small": small()}
SETS |= {"350M": gpt(24, 1024, 50257, 1024), "host": [(64,)] * 148}


# Rate of next to nothing: hundreds of steps on one gradient leave the weights as they are.
RATE = 1e-9
MAKERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "torch AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=RATE, fused=True),
    "torch AdamW(foreach=True)": lambda p: torch.optim.AdamW(p, lr=RATE, foreach=True),
    "LANS(fused=True)": lambda p: LANS(p, lr=RATE, fused=True),
    "LANS(foreach=True)": lambda p: LANS(p, lr=RATE, foreach=True),
    "LANS(foreach=False)": lambda p: LANS(p, lr=RATE, foreach=False),
    "LAMB(fused=True)": lambda p: LAMB(p, lr=RATE, fused=True),
    "LAMB(foreach=True)": lambda p: LAMB(p, lr=RATE, foreach=True),
    "ScaledAdam(fused=True)": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0, fused=True),
    "LANS 8bit(fused=True)": lambda p: LANS(p, lr=RATE, fused=True, state_dtype="8bit"),
    "LAMB 8bit(fused=True)": lambda p: LAMB(p, lr=RATE, fused=True, state_dtype="8bit"),
    "ScaledAdam 8bit(fused=True)": lambda p: ScaledAdam(
        p, RATE, clipping_scale=2.0, fused=True, state_dtype="8bit"
    ),
    "ScaledAdam(foreach=True)": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0, foreach=True),
    "ScaledAdam(foreach=False)": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0, foreach=False),
}
for module, name in (
    ("pytorch_optimizer", "Lamb"),
    ("bitsandbytes.optim", "AdamW8bit"),
    ("torchao.optim", "AdamW8bit"),
):
    with suppress(ImportError):
        peer = getattr(import_module(module), name)
        MAKERS[f"{module.split('.')[0]} {name}"] = partial(peer, lr=RATE)
# Bytes an element: AdamW reads four tensors and writes three. LANS and LAMB read the gradient for
# its norm, then do the same, if a tensor and its states stay in the caches between two passes.
# ScaledAdam reads the gradient for the clipping, and the weight too in every fourth step. Moments
# in eight bits are two bytes in place of eight, read and written.
FLOORS = {"torch AdamW": 28, "LANS 8bit": 20, "LAMB 8bit": 20, "ScaledAdam 8bit": 21}
FLOORS |= {"LANS": 32, "LAMB": 32, "ScaledAdam": 33}


def parameters(
    shapes: Iterable[tuple[int, ...]], dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> list[Tensor]:
    """Weights with gradients."""
    draw = torch.Generator(device).manual_seed(0)

    def drawn(shape: tuple[int, ...], size: float) -> Tensor:
        return torch.randn(shape, generator=draw, device=device).mul_(size).to(dtype)

    found: list[Tensor] = [torch.nn.Parameter(drawn(shape, 0.02)) for shape in shapes]
    for p in found:
        p.grad = drawn(p.shape, 0.01)
    return found


def timings(name: str, rounds: int) -> tuple[list[str], dict[str, Timing]]:
    """The table of one set, and what is in it."""
    params = parameters(SETS[name])
    size = sum(p.numel() for p in params)
    variants: dict[str, Callable[[], object]] = {k: m(params).step for k, m in MAKERS.items()}
    source, target = torch.ones(2, 64 * 2**20).unbind()
    variants["copy of 256 MiB"] = lambda: target.copy_(source)
    # A copy also reads what it overwrites, unless the processor is told not to: a sum in place is
    # three passes for certain.
    variants["sum in place of 256 MiB"] = lambda: target.add_(source)
    found = measure(variants, rounds=rounds, warmup=1, repeats=STEPS)
    copied = 2 * 4 * source.numel() / found["copy of 256 MiB"].seconds
    summed = 3 * 4 * source.numel() / found["sum in place of 256 MiB"].seconds
    head = f"{name}: {size / 1e6:.1f} M in {len(params)} tensors"
    text = [
        f"| {head} | ratio | quartiles | median ms | share of own floor |",
        "|---|---|---|---|---|",
    ]
    for key, timing in found.items():
        text.append(f"| {key} | {numbers(timing)} | {share(key, timing, size, summed)} |")
    rates = f"Copy {copied / 1e9:.1f} GB/s, sum in place {summed / 1e9:.1f} GB/s, read and written."
    return [*text, "", rates, ""], {key: found[key] for key in MAKERS}


def draw(found: dict[str, dict[str, Timing]], path: Path) -> None:
    """Bars of every variant's ratio, a panel for each set."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2), layout="constrained")
    panels = figure.subplots(1, len(found), sharey=True, squeeze=False)[0]
    for axes, (name, some) in zip(panels, found.items(), strict=True):
        ours = [key for key in some if "torch" not in key and "fused=True" in key]
        keys = [*ours, *(key for key in some if key not in ours)][::-1]
        ratios = [some[key].ratio for key in keys]
        bars = axes.barh(keys, ratios, color=["C0" if key in ours else "0.7" for key in keys])
        axes.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=8)
        axes.set(title=name, xlim=(0, 1.2 * max(ratios)))
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("time of a step over that of torch's AdamW(fused=True)", fontsize=9)
    figure.savefig(path, metadata={"Date": None})


def numbers(t: Timing) -> str:
    return f"{t.ratio:.2f} | {t.low:.2f}-{t.high:.2f} | {1e3 * t.seconds:.2f}"


def share(key: str, timing: Timing, size: int, bandwidth: float) -> str:
    floor = next((b for name, b in FLOORS.items() if key.startswith(name)), None)
    return "" if floor is None else f"{floor * size / bandwidth / timing.seconds:.0%}"


def first_step(key: str) -> None:
    """Prints how long a process's first step takes, numba's import included."""
    p = torch.nn.Parameter(torch.ones(1000))
    p.grad = torch.ones(1000)
    optimizer = MAKERS[key]([p])
    start = time.perf_counter()
    optimizer.step()
    print(time.perf_counter() - start)


def extra_memory(key: str) -> None:
    """Prints the most memory a step adds to what the process holds, as a share of the weights'."""
    params = parameters(SETS["23M"])
    optimizer = MAKERS[key](params)
    for _ in range(3):
        optimizer.step()
    peaks = []
    for _ in range(STEPS):
        Path("/proc/self/clear_refs").write_text("5")
        before = resident("VmRSS")
        optimizer.step()
        peaks.append(resident("VmHWM") - before)
    print(max(peaks) / (4 * sum(p.numel() for p in params)))


def resident(field: str) -> int:
    """Bytes of this process in memory, now or at most."""
    found = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field)]
    return 1024 * int(found[0].split()[1])


def alone(what: str, key: str, folder: str | None = None) -> float:
    """Output of a fresh process."""
    environment = {**os.environ, **({"NUMBA_CACHE_DIR": folder} if folder else {})}
    # So that the allocator keeps nothing back, which would hide what is asked for next.
    environment |= {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--threads", str(OPTIONS.threads), f"--{what}", key]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return float(done.stdout.split()[-1])


def beside() -> list[str]:
    """First steps and memory."""
    text = [
        "| variant | first step, empty cache | full cache | extra memory of a step |",
        "|---|---|---|---|",
    ]
    for key in MAKERS:
        with tempfile.TemporaryDirectory() as folder:
            times = [alone("first-step", key, folder) for _ in range(2)]
        try:
            memory = f"{alone('extra-memory', key):.2%}"
        except subprocess.CalledProcessError:
            memory = "not measured here"
        text.append(f"| {key} | {times[0]:.2f} s | {times[1]:.2f} s | {memory} |")
    return [*text, "", "Memory: of the weights' bytes, on the set of 23 M."]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=["23M", "124M", "small"])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[""], help="parts of names, beside AdamW")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--first-step", help=argparse.SUPPRESS)
    parser.add_argument("--extra-memory", help=argparse.SUPPRESS)
    OPTIONS = parser.parse_args()
    torch.set_num_threads(OPTIONS.threads)
    first = next(iter(MAKERS))
    MAKERS = {
        key: m for key, m in MAKERS.items() if key == first or any(o in key for o in OPTIONS.only)
    }
    if OPTIONS.first_step:
        first_step(OPTIONS.first_step)
    elif OPTIONS.extra_memory:
        extra_memory(OPTIONS.extra_memory)
    else:
        today = datetime.date.today().isoformat()
        results = {name: timings(name, OPTIONS.rounds) for name in OPTIONS.sets}
        tables = [line for lines, _ in results.values() for line in lines]
        body = "\n".join([*tables, *beside()])
        text = f"# Time of a step, {today}\n\n{hardware()}.\n\n{body}\n"
        print(text)
        if OPTIONS.save:
            print(save("step-time-cpu", text, today))
            image = Path(__file__).parents[1] / "docs" / "images" / "step_time.svg"
            draw({name: found for name, (_, found) in results.items()}, image)
