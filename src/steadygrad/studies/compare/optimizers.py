"""The table of optimizers that ``compare`` knows: names, default learning rates and knobs."""

import os
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
from steadygrad.studies.compare.schema import BASELINE, Settings
from steadygrad.tasks import Task, load_function
from steadygrad.tasks.made import make_optimizer

__all__ = ["KNOWN", "OWN", "Entry", "entries_of", "made"]

# Bounds of a knob. Its distance from 1, or from 0, is drawn on a logarithmic scale.
DECAYS, BETAS, MOMENTA = (1e-3, 0.3), (0.9, 0.999), (0.8, 0.98)
# Name of the task's own optimizer.
OWN = "task"


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        title: Name of the optimizer in sentences.
        lr: Default learning rate.
        make: ``(model, lr, **knobs) -> optimizer``.
        knobs: Bounds of two options beside the learning rate; empty where none can be tuned.
    """

    title: str
    lr: float
    make: Callable[..., Optimizer]
    knobs: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def knobs_at(self, point: int) -> dict[str, float]:
        """Values of the knobs at a quasi-random point, the same for all optimizers.

        Point 0 is the optimizer's defaults. The others are the sequence R2 of Roberts (2018).
        """
        if point == 0:
            return {}
        ratio = 1.324717957244746
        return {
            name: _between(*bounds, (0.5 + point / ratio**axis) % 1)
            for axis, (name, bounds) in enumerate(self.knobs.items(), start=1)
        }

    def task(self, task: Task, lr: float, point: int, samples: int) -> Task:
        """The task with this optimizer and the schedule that all optimizers have."""
        return replace(
            task,
            make_optimizer=partial(self.make, **self.knobs_at(point)),
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
    return float(low * (high / low) ** place)


def _plain(kind: Callable[..., Optimizer], model: nn.Module, lr: float, **knobs: Any) -> Optimizer:
    if "beta2" in knobs:
        knobs["betas"] = (0.9, knobs.pop("beta2"))
    return kind([p for p in model.parameters() if p.requires_grad], lr=lr, **knobs)


class Joined(Optimizer):
    """Several optimizers as one; each has parameters of its own."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step with each, on this optimizer's state and groups; without a closure."""
        groups = iter(self.param_groups)
        for part in self.parts:
            # Anew each time: a state that is loaded brings dictionaries of its own.
            part.state, part.param_groups = self.state, [next(groups) for _ in part.param_groups]
            part.step()


def _muon(model: nn.Module, lr: float, weight_decay: float = 0.1, momentum: float = 0.95) -> Joined:
    """Torch's Muon for matrices; AdamW for all else, embeddings and the last layer included."""
    modules = list(model.modules())
    linear = [m.weight for m in modules if isinstance(m, nn.Linear)]
    tables = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    tables |= set(map(id, linear[-1:]))
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
    if not matrices:
        raise InputError(
            "Muon needs a matrix beside embeddings and the last layer. Found none in the model. "
            "Remedy: --optimizers without muon."
        )
    kept = set(map(id, matrices))
    others = [p for p in params if id(p) not in kept]
    # Steps as long as AdamW's, so that one learning rate serves both.
    options: Any = {"momentum": momentum, "adjust_lr_fn": "match_rms_adamw"}
    muon = torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, **options)
    if not others:
        return Joined(muon)
    return Joined(muon, torch.optim.AdamW(others, lr=lr, weight_decay=weight_decay))


_ADAM = {"weight_decay": DECAYS, "beta2": BETAS}
_SCALED = {"scalar_lr_scale": (0.01, 0.5), "beta2": BETAS}
_SGD = {"weight_decay": (1e-5, 1e-2), "momentum": MOMENTA}
_MUON = {"weight_decay": DECAYS, "momentum": MOMENTA}
KNOWN: Mapping[str, Entry] = MappingProxyType(
    {
        BASELINE: Entry("AdamW", 1e-3, partial(_plain, torch.optim.AdamW), _ADAM),
        "scaledadam": Entry("ScaledAdam", 3e-2, partial(_plain, ScaledAdam), _SCALED),
        "lans": Entry("LANS", 1e-3, partial(_plain, LANS), _ADAM),
        "lamb": Entry("LAMB", 1e-3, partial(_plain, LAMB), _ADAM),
        "sgd": Entry("SGD", 0.1, partial(_plain, partial(torch.optim.SGD, momentum=0.9)), _SGD),
        "muon": Entry("Muon", 1e-3, _muon, _MUON),
    }
)


def entries_of(
    settings: Settings, task: Task, files: Mapping[str, str] = MappingProxyType({})
) -> dict[str, Entry]:
    """The optimizers that a study compares, AdamW first, by name.

    Args:
        settings: The study's settings.
        task: The task.
        files: Places of the functions of ``--add``. Default: as they are named.

    Raises:
        InputError: If there is no such optimizer, or one is named twice.
    """
    found = {BASELINE: KNOWN[BASELINE]}
    known = {**KNOWN, OWN: Entry("the task's optimizer", task.lr, task.optimizer)}
    names = [name.strip().lower() for name in settings.optimizers.split(",")]
    for name in [name for name in names if name != BASELINE]:
        if name not in known or name in found:
            raise InputError(
                f"--optimizers should be different ones of {', '.join(known)}. Found {name!r}"
                f"{' twice' if name in found else ''}. Remedy: such as scaledadam,lans; --add "
                "takes one of your own."
            )
        found[name] = known[name]
    for spec in filter(None, map(str.strip, settings.add.split(","))):
        name = spec.rpartition(":")[2]
        if name in {**known, **found}:
            raise InputError(
                f"--add should name functions by names of their own. Found {name!r} for two "
                "optimizers. Remedy: another name for the function."
            )
        found[name] = Entry(name, task.lr, _added(files.get(spec, spec)))
    if len(found) == 1:
        raise InputError(
            "Expected an optimizer to compare with AdamW. Found none. Remedy: --optimizers lans."
        )
    return found


def _added(spec: str) -> Callable[..., Optimizer]:
    path, colon, name = spec.rpartition(":")
    there = os.path.isfile(os.path.expanduser(path))
    if not there or not name.isidentifier():
        wrong = "" if there else ": no such file" if colon else ", without a function"
        raise InputError(
            "--add should name a function in a file, as path/file.py:make_optimizer. Found "
            f"{spec!r}{wrong}. Remedy: check the path, relative to {Path.cwd()}."
        )
    return load_function(spec)


def made(name: str, entry: Entry, model: nn.Module) -> Optimizer:
    """The optimizer of an entry at its default rate, checked.

    Raises:
        InputError: If it is not made anew, changes the model, or its rate cannot be set.
    """
    make = partial(entry.make, model)
    return make_optimizer(make, model, entry.lr, f"The optimizer {name}", varied=True)
