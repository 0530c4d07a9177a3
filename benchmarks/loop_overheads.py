"""Cost of each tool in a whole training step of the language model, in one table and one run.

Every pair does the same work with and without the tool: four micro-batches of eight sequences, or
one batch of 32, AdamW unless it says otherwise, float32 throughout.

- Noise scale: four micro-batches, measured or not.
- Loss balancer: cross-entropy and a penalty on large logits, through ``fork`` or summed.
- Layer-wise scaler: beside torch's GradScaler, two of the blocks with scales of their own.
- ScaledAdam and LANS: beside AdamW(fused=True).

Run: python benchmarks/loop_overheads.py [--rounds 40] [--threads 2] [--save]
"""

import argparse
import copy
import datetime
from collections.abc import Callable

import torch
from side_by_side import hardware, measure, save
from torch import Tensor, nn

from steadygrad import LossBalancer
from steadygrad.noise import NoiseScale
from steadygrad.optim import LANS, ScaledAdam
from steadygrad.scale import LayerwiseGradScaler
from steadygrad.tasks import load_task

TASK = load_task("char-lm")
BATCH = TASK.train.batch(torch.arange(32))
Step = Callable[[], object]


def start(model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    own = copy.deepcopy(model)
    return own, torch.optim.AdamW(own.parameters(), lr=1e-4, fused=True)


def noise(model: nn.Module, measured: bool) -> Step:
    own, optimizer = start(model)
    tool = NoiseScale(own) if measured else None
    parts = list(zip(*(x.split(8) for x in BATCH), strict=True))

    def step() -> None:
        for part in parts:
            loss = TASK.per_sample_loss(own, part).mean() / len(parts)
            if tool is None:
                loss.backward()
            else:
                with tool.microbatch(8):
                    loss.backward()
        if tool is not None:
            tool.step()
        optimizer.step()
        optimizer.zero_grad()

    return step


def entropy(logits: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), BATCH[-1].flatten())


def size(logits: Tensor) -> Tensor:
    return logits.logsumexp(-1).square().mean()


LOSSES = {"entropy": (entropy, 1.0), "size": (size, 0.01)}


def balance(model: nn.Module, balanced: bool) -> Step:
    own, optimizer = start(model)
    balancer = LossBalancer({n: weight for n, (_, weight) in LOSSES.items()}) if balanced else None

    def step() -> None:
        logits = own(BATCH[0])
        if balancer is None:
            sum(weight * loss(logits) for loss, weight in LOSSES.values()).backward()
        else:
            branches = balancer.fork(logits)
            sum(loss(branches[name]) for name, (loss, _) in LOSSES.items()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def scale(model: nn.Module, layerwise: bool) -> Step:
    own, optimizer = start(model)
    scaler = (
        LayerwiseGradScaler(own, {"blocks.*": 2.0**4}, init_scale=2.0**10)
        if layerwise
        else torch.amp.GradScaler("cpu", init_scale=2.0**10)
    )

    def step() -> None:
        scaler.scale(TASK.per_sample_loss(own, BATCH).mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step


def train(model: nn.Module, make: Callable[..., torch.optim.Optimizer] | None) -> Step:
    own, optimizer = start(model)
    optimizer = optimizer if make is None else make(own.parameters())

    def step() -> None:
        TASK.per_sample_loss(own, BATCH).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = TASK.make_model()
    pairs = {
        "NoiseScale, four micro-batches": (noise(model, False), noise(model, True)),
        "LossBalancer.fork, two losses": (balance(model, False), balance(model, True)),
        "LayerwiseGradScaler, two blocks": (scale(model, False), scale(model, True)),
        "ScaledAdam": (
            train(model, None),
            train(model, lambda p: ScaledAdam(p, 1e-3, clipping_scale=2.0)),
        ),
        "LANS": (train(model, None), train(model, lambda p: LANS(p, 1e-4))),
    }
    lines = ["| tool | whole step, with / without | quartiles | ms without |", "|---|---|---|---|"]
    for name, (without, with_it) in pairs.items():
        found = measure({"without": without, "with": with_it}, rounds=args.rounds, warmup=30)
        t, base = found["with"], found["without"]
        row = f"{t.ratio:.3f} | {t.low:.3f}-{t.high:.3f} | {1e3 * base.seconds:.1f}"
        lines.append(f"| {name} | {row} |")
    today = datetime.date.today().isoformat()
    parameters = sum(p.numel() for p in model.parameters())
    head = f"# What each tool adds to a training step, {today}\n\n{hardware()}."
    text = f"{head}\nLanguage model of {parameters / 1e6:.2f} M parameters.\n\n" + "\n".join(lines)
    print(text)
    if args.save:
        print(save("loop-overheads-cpu", text + "\n", today))


if __name__ == "__main__":
    main()
