"""How the time of a step grows with parameters and with tensors, fitted; and what shards send.

Two sweeps in one run, float32, each timing beside AdamW's of the same size: 1 to 300 million
parameters in 76 tensors, and 10 to 3,000 tensors of 3 million parameters together. The fit is

    time = a + b * tensors + c * parameters

by least squares of relative errors. Then sharded steps on 1, 2 and 4 processes (gloo, FSDP2):
collectives and bytes, counted, beside what the layout says they must be.

Run: python benchmarks/step_growth.py [--rounds 7] [--largest 300e6] [--threads 2] [--save]
"""

import argparse
import datetime
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from side_by_side import hardware, measure, save
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from steadygrad.optim import LANS, ScaledAdam

RATE = 1e-9
MAKERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "torch AdamW(fused=True)": lambda p: torch.optim.AdamW(p, lr=RATE, fused=True),
    "LANS": lambda p: LANS(p, lr=RATE),
    "ScaledAdam": lambda p: ScaledAdam(p, RATE, clipping_scale=2.0),
}
SIZES = [1e6, 3e6, 10e6, 30e6, 100e6, 300e6]
COUNTS = [10, 30, 100, 300, 1000, 3000]
TENSORS, ELEMENTS = 76, 3e6


@dataclass(frozen=True)
class Point:
    """One size: tensors, parameters in all, and each variant's median seconds."""

    tensors: int
    elements: int
    seconds: dict[str, float]


def point(tensors: int, elements: float, rounds: int) -> Point:
    """Times every variant on tensors of one size."""
    each = int(elements / tensors)
    params = [nn.Parameter(torch.full((each,), 0.02)) for _ in range(tensors)]
    for p in params:
        p.grad = torch.full_like(p, 0.01)
    # All share weights and gradients: with three states the largest size takes 10 GB.
    steps: dict[str, Callable[[], object]] = {k: make(params).step for k, make in MAKERS.items()}
    found = measure(steps, rounds=rounds, warmup=1, repeats=4)
    return Point(tensors, tensors * each, {name: t.seconds for name, t in found.items()})


def fit(points: Sequence[Point], name: str) -> tuple[np.ndarray, float]:
    """Seconds fixed, a tensor and an element; and the median relative error."""
    times = np.array([p.seconds[name] for p in points])
    rows = np.array([(1, p.tensors, p.elements) for p in points])
    found, *_ = np.linalg.lstsq(rows / times[:, None], np.ones(len(times)), rcond=None)
    return found, float(np.median(abs(rows @ found / times - 1)))


def growth(points: Sequence[Point]) -> list[str]:
    """Tables of the points and of the fit."""
    first, *others = MAKERS
    lines = [f"| tensors | parameters | {first}, ms | {' | '.join(others)} |"]
    lines.append("|---|---|---|" + "---|" * len(others))
    for p in points:
        base = p.seconds[first]
        ratios = " | ".join(f"{p.seconds[name] / base:.2f}" for name in others)
        lines.append(f"| {p.tensors} | {p.elements / 1e6:.0f} M | {1e3 * base:.2f} | {ratios} |")
    lines += ["", "The others as ratios. Fitted:", ""]
    lines += ["| variant | fixed, ms | a tensor, us | a million parameters, ms | error |"]
    lines += ["|---|---|---|---|---|"]
    for name in MAKERS:
        (a, b, c), error = fit(points, name)
        lines.append(f"| {name} | {1e3 * a:.2f} | {1e6 * b:.2f} | {1e9 * c:.2f} | {error:.0%} |")
    return lines


class Net(nn.Module):
    """Some layers, to be sharded."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def traffic(step: Callable[[], object]) -> tuple[int, int]:
    """Collectives of a step, and the bytes that all-reduces are handed."""
    sent: list[int] = []
    plain = dist.all_reduce

    def seen(tensor: Tensor, *args: object, **options: object) -> object:
        sent.append(tensor.nbytes)
        return plain(tensor, *args, **options)

    dist.all_reduce = seen
    try:
        with CommDebugMode() as mode:
            step()
    finally:
        dist.all_reduce = plain
    return mode.get_total_counts(), sum(sent)


def counted(rank: int, world: int, folder: str) -> None:
    """One process: counts collectives and bytes of a step."""
    store = dist.FileStore(f"{folder}/store-{world}", world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    lines = []
    for layers in (4, 64):
        for name in ("LANS", "ScaledAdam"):
            model = Net(layers)
            fully_shard(model)
            optimizer = MAKERS[name](list(model.parameters()))
            model(torch.randn(8, 64)).square().mean().backward()
            collectives, sent = traffic(optimizer.step)
            params = len(list(model.parameters()))
            lines.append(f"| {world} | {params} | {name} | {collectives} | {sent} |")
    if rank == 0:
        Path(f"{folder}/{world}.md").write_text("\n".join(lines))
    dist.destroy_process_group()


def sharded() -> list[str]:
    """Collectives and bytes by world size."""
    lines = ["| processes | tensors | optimizer | collectives | bytes |", "|---|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        for world in (1, 2, 4):
            torch.multiprocessing.spawn(counted, args=(world, folder), nprocs=world)
            lines += Path(f"{folder}/{world}.md").read_text().splitlines()
    return [*lines, "", "Eight bytes a number: LANS one and three a tensor, ScaledAdam three."]


def draw(points: Sequence[Point], path: Path) -> None:
    """Both sweeps with their fits."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    sweeps = {
        left: ([p for p in points if p.tensors == TENSORS], "parameters", "elements"),
        right: ([p for p in points if p.tensors != TENSORS], "tensors", "tensors"),
    }
    for axes, (some, label, field) in sweeps.items():
        for i, name in enumerate(MAKERS):
            (a, b, c), _ = fit(points, name)
            x = [getattr(p, field) for p in some]
            axes.plot(x, [1e3 * p.seconds[name] for p in some], f"C{i}o", label=name, ms=4)
            model = [1e3 * (a + b * p.tensors + c * p.elements) for p in some]
            axes.plot(x, model, f"C{i}-", lw=1)
        axes.set(xscale="log", yscale="log", xlabel=label, ylabel="ms a step")
    left.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--largest", type=float, default=300e6)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    points = [point(TENSORS, s, options.rounds) for s in SIZES if s <= options.largest]
    points += [point(count, ELEMENTS, options.rounds) for count in COUNTS]
    today = datetime.date.today().isoformat()
    body = "\n".join([*growth(points), "", "## Sharded steps", "", *sharded()])
    text = f"# How a step's time grows, {today}\n\n{hardware()}.\n\n{body}\n"
    print(text)
    if options.save:
        print(save("step-growth-cpu", text, today))
        draw(points, Path(__file__).parents[1] / "docs" / "images" / "step_growth.svg")
