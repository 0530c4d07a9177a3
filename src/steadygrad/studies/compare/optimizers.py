"""The table of optimizers that ``compare`` knows: names, default learning rates and knobs."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.record.schema.compare import BASELINE, Settings
from steadygrad.tasks import Task, load_function

__all__ = ["KNOWN", "Entry", "entries_of"]

# Bounds of a knob. Its distance from 1, or from 0, is drawn on a logarithmic scale.
DECAYS, BETAS, MOMENTA = (1e-3, 0.3), (0.9, 0.999), (0.8, 0.98)
# Name of the task's own optimizer.
OWN = "task"

Make = Callable[..., Optimizer]


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        title: Its name in sentences.
        lr: Default learning rate.
        make: ``(model, lr, **knobs) -> optimizer``.
        knobs: Bounds of two options beside the learning rate; empty where none can be tuned.
    """

    title: str
    lr: float
    make: Make
    knobs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def knobs_at(self, point: int) -> dict[str, float]:
        """Values of the knobs at a quasi-random point, the same for all optimizers.

        Point 0 is the optimizer's defaults. The others are the sequence R2 of Roberts (2018).
        """
        if point == 0:
            return {}
        golden = 1.324717957244746
        places = [(0.5 + point / golden ** (axis + 1)) % 1 for axis in range(len(self.knobs))]
        return {
            name: _between(*bounds, place)
            for (name, bounds), place in zip(self.knobs.items(), places, strict=True)
        }

    def task(self, task: Task, lr: float, point: int, samples: int) -> Task:
        """The task with this optimizer and the schedule that all optimizers have."""
        make = partial(self.make, **self.knobs_at(point))
        return replace(
            task,
            make_optimizer=make,
            optimizer_takes="model",
            lr=lr,
            lr_rule="constant",
            warmup_samples=samples // 10,
            lr_decay="linear",
        )


def _between(low: float, high: float, place: float) -> float:
    """A value between two, logarithmic in its distance from 0, or from 1 where it may be near."""
    if high > 0.5:
        return 1 - _between(1 - high, 1 - low, 1 - place)
    return low * (high / low) ** place


def _plain(kind: Callable[..., Optimizer], model: nn.Module, lr: float, **knobs: Any) -> Optimizer:
    if "beta2" in knobs:
        knobs["betas"] = (0.9, knobs.pop("beta2"))
    return kind([p for p in model.parameters() if p.requires_grad], lr=lr, **knobs)


class Joined(Optimizer):
    """Several optimizers as one; each has parameters of its own."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([p for part in parts for p in part.param_groups], {})
        # The same dictionaries: a learning rate that is set here acts there.
        self.param_groups = [group for part in parts for group in part.param_groups]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step with each."""
        for part in self.parts:
            part.step()
            self.state.update(part.state)


def _muon(model: nn.Module, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> Any:
    """Torch's Muon for matrices; AdamW for all else, embeddings and the last layer included."""
    modules = list(model.modules())
    tables = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    linear = [m for m in modules if isinstance(m, nn.Linear)]
    tables |= {id(linear[-1].weight)} if linear else set()
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
    kept = {id(p) for p in matrices}
    others = [p for p in params if id(p) not in kept]
    parts: list[Optimizer] = []
    if matrices:
        # Steps as long as AdamW's, so that one learning rate serves both.
        options: Any = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
        parts.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **options))
    if others:
        parts.append(torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay))
    return parts[0] if len(parts) == 1 else Joined(*parts)


_ADAM = {"weight_decay": DECAYS, "beta2": BETAS}
KNOWN: Mapping[str, Entry] = MappingProxyType(
    {
        BASELINE: Entry("AdamW", 1e-3, partial(_plain, torch.optim.AdamW), _ADAM),
        "scaledadam": Entry(
            "ScaledAdam",
            3e-2,
            partial(_plain, ScaledAdam),
            {"scalar_lr_scale": (0.01, 0.5), "beta2": BETAS},
        ),
        "lans": Entry("LANS", 1e-3, partial(_plain, LANS), _ADAM),
        "lamb": Entry("LAMB", 1e-3, partial(_plain, LAMB), _ADAM),
        "sgd": Entry(
            "SGD",
            0.1,
            partial(_plain, partial(torch.optim.SGD, momentum=0.9)),
            {"weight_decay": (1e-5, 1e-2), "momentum": MOMENTA},
        ),
        "muon": Entry("Muon", 1e-3, _muon, {"weight_decay": DECAYS, "momentum": MOMENTA}),
    }
)


def entries_of(settings: Settings, task: Task, folder: str = ".") -> dict[str, Entry]:
    """The optimizers that a study compares, AdamW first, by name.

    Args:
        settings: The study's settings.
        task: The task.
        folder: Folder in which the study was started.

    Raises:
        InputError: If there is no such optimizer, or one is named twice.
    """
    found = {BASELINE: KNOWN[BASELINE]}
    names = [name.strip().lower() for name in settings.optimizers.split(",")]
    own = Entry("the task's own optimizer", task.lr, _own(task))
    for name in [name for name in names if name != BASELINE]:
        entry = own if name == OWN else KNOWN.get(name)
        if entry is None or name in found:
            raise InputError(
                f"--optimizers should be different ones of {', '.join(KNOWN)}, {OWN}. Found "
                f"{name!r}{' twice' if entry else ''}. Remedy: such as scaledadam,lans; --add "
                "takes one of your own."
            )
        found[name] = entry
    for spec in filter(None, (spec.strip() for spec in settings.add.split(","))):
        path, _, name = spec.rpartition(":")
        there = path if Path(path).exists() else str(Path(folder) / path)
        found[name] = Entry(name, task.lr, load_function(f"{there}:{name}"))
    if len(found) == 1:
        raise InputError(
            "Expected an optimizer to compare with AdamW. Found none. Remedy: --optimizers lans."
        )
    return found


def _own(task: Task) -> Make:
    def make(model: nn.Module, lr: float) -> Optimizer:
        return task.optimizer(model, lr)

    return make
