"""Cost of exact per-example norms in a training step, as a whole and layer type by layer type.

One step is four micro-batches of 8 sequences of 64 characters through the built-in language
model (254,000 parameters) and one AdamW update. All variants run in turn, in the same process;
a ratio is the median over rounds of variant / plain, side by side.

    python benchmarks/per_example_layers.py [--rounds 100] [--threads 2]
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.noise.per_example import ExampleNorms
from steadygrad.tasks.char_lm import CharTransformer

MICRO_BATCHES, BATCH, CONTEXT, VOCABULARY = 4, 8, 64, 96
KINDS = {"norm": nn.LayerNorm, "embedding": nn.Embedding, "linear": nn.Linear}


class Variant:
    """The language model with its own optimizer, measured where ``kinds`` says."""

    def __init__(self, kinds: tuple[type[nn.Module], ...], record: bool) -> None:
        torch.manual_seed(0)
        self.model = CharTransformer(VOCABULARY, context=CONTEXT)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)
        self.record = record and bool(kinds)
        if kinds:
            # What is frozen now is not measured later either.
            for module in self.model.modules():
                for parameter in module._parameters.values():
                    if parameter is not None:
                        parameter.requires_grad_(isinstance(module, kinds))
            self.taps = ExampleNorms(self.model)
            self.model.requires_grad_(True)

    def step(self, batches: list[tuple[Tensor, Tensor]]) -> float:
        start = time.perf_counter()
        for inputs, targets in batches:
            logits = self.model(inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten()) / len(batches)
            if self.record:
                with self.taps.recording(len(inputs)):
                    loss.backward()
            else:
                loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - start


def variants() -> dict[str, Variant]:
    every = tuple(KINDS.values())
    table = {"plain": Variant((), False), "taps, not recording": Variant(every, False)}
    for name, kind in KINDS.items():
        table[f"{name} layers only"] = Variant((kind,), True)
    table["all layers"] = Variant(every, True)
    return table


def run(table: dict[str, Variant], rounds: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in table}
    for round_number in range(rounds + 3):
        shape = (MICRO_BATCHES, BATCH, CONTEXT)
        pairs = zip(*(torch.randint(0, VOCABULARY, shape) for _ in range(2)), strict=True)
        batches = list(pairs)
        for name, variant in table.items():
            elapsed = variant.step(batches)
            # The first rounds allocate, and compare.
            if round_number >= 3:
                times[name].append(elapsed)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    times = run(variants(), options.rounds)
    print(f"torch {torch.__version__}, {platform.machine()}, {options.threads} threads")
    print(f"{'':36s}{'median ms':>10s}{'ratio':>8s}{'ratio of minima':>17s}")
    plain = times["plain"]
    middle: Callable[[list[float]], float] = statistics.median
    for name, own in times.items():
        ratio = middle([a / b for a, b in zip(own, plain, strict=True)])
        print(f"{name:36s}{middle(own) * 1e3:10.2f}{ratio:8.3f}{min(own) / min(plain):17.3f}")


if __name__ == "__main__":
    main()
