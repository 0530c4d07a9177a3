"""Training an arm: what `advise`, `compare` and `ab` do for each result."""

import math
from collections.abc import Sequence

from steadygrad.studies.learning_rate import Rate
from steadygrad.studies.order import main_order
from steadygrad.studies.trainer import Diverged
from steadygrad.studies.work import Workplace


def train(
    place: Workplace,
    batch_size: int,
    samples: int,
    seed: int,
    rate: Rate,
    *,
    marks: Sequence[int] = (),
    must_hold: bool = False,
) -> tuple[tuple[int, float], ...]:
    """Trains the place's task from its initial weights, and evaluates after each mark.

    Arms that are trained with one seed begin with the same weights, and see the same samples and
    random numbers. ``marks`` are numbers of samples. Default: the end alone. Samples seen and
    validation losses are returned; the last loss is infinite where the training diverged, which is
    an error where it ``must_hold``.
    """
    trainer, at, left = place.trainer, 0, sorted({*marks, samples})
    found: list[tuple[int, float]] = []

    def evaluate() -> None:
        loss = place.evaluate()
        if must_hold and not math.isfinite(loss):
            raise Diverged(
                f"The validation loss should stay finite. Found {loss} after {trainer.steps} "
                f"steps. Remedy: a lower Task.lr than {trainer.task.lr:g}."
            )
        found.append((at, loss if math.isfinite(loss) else math.inf))

    trainer.restart(seed)
    trainer.seed_everything("run", seed)
    order = main_order(len(trainer.task.train), trainer.seed, seed)
    try:
        for seen in trainer.run(order, 0, samples, batch_size, rate=rate):
            place.advance(seen - at)
            at = seen
            if at >= left[0]:
                evaluate()
                left = [mark for mark in left if mark > at] or [samples + batch_size]
        if not found or found[-1][0] < at:
            evaluate()
    except Diverged:
        if must_hold:
            raise
        return *found, (samples, math.inf)
    return tuple(found)
