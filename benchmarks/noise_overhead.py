"""What measuring the noise scale adds to a training step of the language model.

Every variant does the same work: one AdamW step on 32 sequences, as four micro-batches of eight.
`SplitBatchNoiseScale` needs the whole batch's losses in one graph, so it is compared with a step on
one batch of 32. Run: python benchmarks/noise_overhead.py [--rounds 40] [--threads 2] [--save]
"""

import argparse
import copy
import datetime
from collections.abc import Callable

import torch
from side_by_side import Timing, hardware, measure, save, table
from torch import nn

from steadygrad.noise import NoiseScale, SplitBatchNoiseScale
from steadygrad.tasks import load_task

MICRO, COUNT = 8, 4


class Step:
    """One training step of a copy of the model, with or without a measurement."""

    def __init__(self, model: nn.Module, noise: Callable[[nn.Module], NoiseScale] | None) -> None:
        self.model = copy.deepcopy(model)
        self.optimizer = TASK.make_optimizer(self.model.parameters(), TASK.lr)
        self.noise = noise(self.model) if noise else None

    def __call__(self) -> None:
        for batch in BATCHES:
            loss = TASK.per_sample_loss(self.model, batch).mean() / COUNT
            if self.noise is None:
                loss.backward()
            else:
                with self.noise.microbatch(MICRO):
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
        self.mode = mode

    def __call__(self) -> None:
        losses = TASK.per_sample_loss(self.model, WHOLE)
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
    micro: dict[str, Timing] = measure(
        {
            "plain training step": Step(model, None),
            "NoiseScale, micro-batches": Step(model, NoiseScale),
            "NoiseScale, exact per example": Step(
                model, lambda m: NoiseScale(m, source="per_example")
            ),
            "NoiseScale, norm layers per example": Step(
                model, lambda m: NoiseScale(m, source="per_example", layers="norm")
            ),
        },
        rounds=rounds,
    )
    whole = measure(
        {
            "plain training step": WholeBatch(model, "plain"),
            "SplitBatchNoiseScale, then backward": WholeBatch(model, "extra"),
            "SplitBatchNoiseScale, fill_grad": WholeBatch(model, "filled"),
        },
        rounds=max(rounds // 2, 5),
    )
    return "\n\n".join([table(micro, "4 micro-batches of 8"), table(whole, "one batch of 32")])


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
    DRAW = torch.Generator().manual_seed(0)
    INDICES = torch.randperm(len(TASK.train), generator=DRAW)[: MICRO * COUNT]
    BATCHES = [tuple(x.to(DEVICE) for x in TASK.train.batch(i)) for i in INDICES.split(MICRO)]
    WHOLE = tuple(x.to(DEVICE) for x in TASK.train.batch(INDICES))
    today = datetime.date.today().isoformat()
    text = (
        f"# Noise scale: cost of a step, {today}\n\n{hardware(DEVICE)}.\n\n{run(options.rounds)}\n"
    )
    print(text)
    if options.save:
        print(save(f"noise-overhead-{DEVICE}", text, today))
