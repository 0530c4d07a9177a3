"""Cost of measuring the noise scale in a training step of the language model.

Every variant does the same work: one AdamW step on four micro-batches, of eight and of 32
sequences. `SplitBatchNoiseScale` needs the whole batch's losses in one graph, so it is compared
with a step on one batch of 32.

Run: python benchmarks/noise_overhead.py [--rounds 40] [--threads 2] [--save]
"""

import argparse
import copy
import datetime
from collections.abc import Callable

import torch
from side_by_side import hardware, measure, save, table
from torch import nn

from steadygrad.noise import NoiseScale, SplitBatchNoiseScale
from steadygrad.tasks import load_task

COUNT = 4


def batches(size: int, count: int) -> list[tuple[torch.Tensor, ...]]:
    """Micro-batches drawn from the training data, the same for every variant."""
    draw = torch.Generator().manual_seed(0)
    indices = torch.randperm(len(TASK.train), generator=draw)[: size * count]
    return [tuple(x.to(DEVICE) for x in TASK.train.batch(i)) for i in indices.split(size)]


class Step:
    """One training step of a copy of the model, with or without a measurement."""

    def __init__(
        self,
        model: nn.Module,
        size: int,
        noise: Callable[[nn.Module], NoiseScale] | None,
        found: bool = False,
    ) -> None:
        self.found = found
        self.size, self.batches = size, batches(size, COUNT)
        self.model = copy.deepcopy(model)
        self.optimizer = TASK.make_optimizer(self.model.parameters(), TASK.lr)
        self.noise = noise(self.model) if noise else None

    def __call__(self) -> None:
        for batch in self.batches:
            loss = TASK.per_sample_loss(self.model, batch).mean() / COUNT
            if self.noise is None or self.found:
                loss.backward()
            else:
                with self.noise.microbatch(self.size):
                    loss.backward()
        if self.noise is not None:
            self.noise.step()
        self.optimizer.step()
        self.optimizer.zero_grad()


class WholeBatch:
    """One step on all samples at once, plain or through the split-batch estimator."""

    def __init__(self, model: nn.Module, mode: str) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = TASK.make_optimizer(self.model.parameters(), TASK.lr)
        self.estimator = SplitBatchNoiseScale()
        (self.batch,) = batches(32, 1)
        self.mode = mode

    def __call__(self) -> None:
        losses = TASK.per_sample_loss(self.model, self.batch)
        parameters = list(self.model.parameters())
        if self.mode != "plain":
            self.estimator(losses, parameters, fill_grad=self.mode == "filled")
        if self.mode != "filled":
            losses.mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def run(rounds: int) -> str:
    """Measures everything and returns the tables."""
    torch.manual_seed(0)
    model = TASK.make_model().to(DEVICE)
    tables = []
    for size in (8, 32):
        makers = {
            "plain training step": None,
            "NoiseScale, micro-batches": NoiseScale,
            "NoiseScale, micro-batches found": lambda m, n=size: NoiseScale(m, samples=n),
            "NoiseScale, micro-batches, every 4th step": lambda m: NoiseScale(m, every=4),
            "NoiseScale, exact per example": lambda m: NoiseScale(m, source="per_example"),
        }
        steps = {
            name: Step(model, size, maker, found="found" in name) for name, maker in makers.items()
        }
        # A mean over rounds of four, so that a step in four is seen as such.
        results = measure(steps, rounds=rounds if size == 8 else rounds // 2, repeats=4)
        tables.append(table(results, f"{COUNT} micro-batches of {size}"))
    whole = measure(
        {
            "plain training step": WholeBatch(model, "plain"),
            "SplitBatchNoiseScale, then backward": WholeBatch(model, "extra"),
            "SplitBatchNoiseScale, fill_grad": WholeBatch(model, "filled"),
        },
        rounds=max(rounds // 2, 5),
    )
    return "\n\n".join([*tables, table(whole, "one batch of 32")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    DEVICE = options.device
    TASK = load_task("char-lm")
    today = datetime.date.today().isoformat()
    text = (
        f"# Noise scale: cost of a step, {today}\n\n{hardware(DEVICE)}.\n\n{run(options.rounds)}\n"
    )
    print(text)
    if options.save:
        print(save(f"noise-overhead-{DEVICE}", text, today))
