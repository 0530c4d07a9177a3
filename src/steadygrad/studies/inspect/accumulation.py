"""Whether a task's gradient is the same however its batch is cut into micro-batches."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad.studies.inspect.schema import Accumulation, Cut
from steadygrad.studies.study import Workplace
from steadygrad.tasks import to_device
from steadygrad.watch import check_accumulation

__all__ = ["check", "explain"]

# Micro-batches of a window, and samples of the smallest batch that is cut.
PARTS, LEAST = 4, 8


def check(place: Workplace) -> Accumulation:
    """Compares the first samples' gradient with its accumulation over micro-batches, in float32."""
    trainer, task = place.trainer, place.trainer.task
    trainer.restart()
    trainer.seed_everything("accumulation")
    count = min(max(LEAST, task.batch_size), len(task.train))

    def mean(model: nn.Module, indices: Tensor) -> Tensor:
        return task.per_sample_loss(model, to_device(task.train.batch(indices), model)).mean()

    def by_samples(micros: Sequence[Tensor]) -> None:
        total = sum(map(len, micros))
        for micro in micros:
            torch.autograd.backward(mean(trainer.model, micro) * (len(micro) / total))

    found = check_accumulation(
        trainer.model,
        mean,
        torch.arange(count),
        accumulate=by_samples,
        micro_batches=PARTS,
        # The task says what one sample is: their order is not asked.
        split=lambda indices, rows: indices[rows],
        samples=count,
    )
    return Accumulation(
        cuts=tuple(
            Cut(
                name=w.name, sizes=w.sizes, ratio=w.ratio, cosine=w.cosine, bug=w.bug, words=w.words
            )
            for w in found.windows
        )
    )


def explain(found: Accumulation | None) -> list[str]:
    """The finding in a sentence for each bug."""
    if found is None:
        return []
    bugs: Mapping[str, Any] = {cut.bug: cut for cut in found.cuts if cut.bug}
    if not bugs:
        said = (
            "Accumulated over micro-batches, equal, ragged, single and in a short window, the "
            "gradient is that of the whole batch."
        )
        return [said]
    return [f"Accumulation over {cut.name}: {cut.words}" for cut in bugs.values()]
