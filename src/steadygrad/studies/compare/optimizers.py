"""The optimizers that ``compare`` trains with: those built in, the task's, and a user's own."""

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.studies.compare.libraries import find
from steadygrad.studies.compare.schema import BASELINE, KNOWN, OWN, Settings, Traits
from steadygrad.tasks import Task, load_function


@dataclass(frozen=True)
class Entry:
    """One optimizer.

    Attributes:
        lr: Default learning rate.
        make: ``(model, lr) -> optimizer``.
        traits: As the plan has them.
    """

    lr: float
    make: Callable[..., Optimizer]
    traits: Traits = field(default_factory=Traits)

    def rate(self, multiple: float) -> float:
        """The learning rate to begin with at a multiple of the task's batch size."""
        return self.lr if self.traits.own_rate else self.lr * math.sqrt(multiple)

    def task(self, task: Task, lr: float, samples: int) -> Task:
        """The task with this optimizer, and the schedule of all that have none of their own."""
        return replace(
            task,
            make_optimizer=self.ready,
            optimizer_takes="model",
            lr=lr,
            lr_rule="constant",
            warmup_samples=0 if self.traits.own_schedule else samples // 10,
            lr_decay="none" if self.traits.own_schedule else "linear",
        )

    def ready(self, model: nn.Module, lr: float) -> Optimizer:
        """The optimizer, in the mode for training where it has modes."""
        options = {"matrices": True} if self.traits.matrices else {}
        optimizer = self.make(model, lr, **options)
        getattr(optimizer, "train", lambda: None)()
        return optimizer


def _plain(kind: Callable[..., Optimizer], model: nn.Module, lr: float) -> Optimizer:
    return kind([p for p in model.parameters() if p.requires_grad], lr=lr)


class Joined(Optimizer):
    """Several optimizers as one; each has parameters of its own."""

    def __init__(self, *parts: Optimizer) -> None:
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        for part in parts:
            part.state = self.state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes a step with each, on this optimizer's state and groups; without a closure."""
        for part in self.parts:
            part.step()


def _muon(model: nn.Module, lr: float) -> Joined:
    """Torch's Muon, with steps as long as AdamW's, so that one learning rate serves both."""
    options: Any = {"lr": lr, "weight_decay": 0.1}
    muon = partial(torch.optim.Muon, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options)
    return _split(model, muon, partial(torch.optim.AdamW, **options))


def _library(
    kind: Callable[..., Optimizer],
    default: float,
    model: nn.Module,
    lr: float,
    *,
    matrices: bool = False,
) -> Optimizer:
    """One of a library; AdamW beside it has its own default rate, and follows the other's."""
    if not matrices:
        return _plain(kind, model, lr)
    adamw = partial(torch.optim.AdamW, lr=KNOWN[BASELINE].lr * lr / default)
    return _split(model, partial(kind, lr=lr), adamw)


def _split(
    model: nn.Module, kind: Callable[..., Optimizer], rest: Callable[..., Optimizer]
) -> Joined:
    """One optimizer for matrices; another for all else, embeddings and the last layer included."""
    modules = list(model.modules())
    linear = [m.weight for m in modules if isinstance(m, nn.Linear)]
    tables = {id(m.weight) for m in modules if isinstance(m, nn.Embedding)}
    tables |= set(map(id, linear[-1:]))
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
    if not matrices:
        raise InputError(
            "Muon and its like need a matrix beside embeddings and the last layer. Found none in "
            "the model. Remedy: --optimizers without it."
        )
    kept = set(map(id, matrices))
    others = [p for p in params if id(p) not in kept]
    return Joined(kind(matrices), *([rest(others)] if others else []))


_MAKERS: Mapping[str, Callable[..., Optimizer]] = {
    BASELINE: partial(_plain, torch.optim.AdamW),
    "scaledadam": partial(_plain, ScaledAdam),
    "lans": partial(_plain, LANS),
    "lamb": partial(_plain, LAMB),
    "sgd": partial(_plain, partial(torch.optim.SGD, momentum=0.9)),
    "muon": _muon,
}


def entries_of(settings: Settings, task: Task, files: Mapping[str, str] = {}) -> dict[str, Entry]:
    """The optimizers that a study compares, AdamW first, by name.

    The functions of ``--add`` are at ``files``. Default: as they are named.
    """
    known = {name: Entry(own.lr, _MAKERS[name]) for name, own in KNOWN.items()}
    known[OWN] = Entry(task.lr, task.optimizer)
    found = {BASELINE: known[BASELINE]}
    for name in map(str.strip, settings.optimizers.split(",")):
        name = name if ":" in name else name.lower()
        if name == BASELINE:
            continue
        if name in found or not (name in known or ":" in name):
            raise InputError(
                f"--optimizers should be different ones of {', '.join(known)}, or "
                f"library:name. Found {name!r}{' twice' if name in found else ''}. Remedy: such "
                "as scaledadam,timm:adan; --add takes one of your own."
            )
        if name in known:
            found[name] = known[name]
        else:
            kind, lr = find(name, task.lr)
            found[name] = Entry(lr, partial(_library, kind, lr))
    for spec in filter(None, map(str.strip, settings.add.split(","))):
        name = spec.rpartition(":")[2]
        if name in {**known, **found}:
            raise InputError(
                f"--add should name functions by names of their own. Found {name!r} for two "
                "optimizers. Remedy: another name for the function."
            )
        found[name] = Entry(task.lr, _added(files.get(spec, spec)))
    if len(found) == 1:
        raise InputError(
            "Expected an optimizer to compare with AdamW. Found none. Remedy: --optimizers lans."
        )
    return found


def _added(spec: str) -> Callable[..., Optimizer]:
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(os.path.expanduser(path)) or not name.isidentifier():
        raise InputError(
            "--add should name a function in a file that is there, as path/file.py:make_optimizer. "
            f"Found {spec!r}. Remedy: check the path, relative to {Path.cwd()}."
        )
    return load_function(spec)
