"""The optimizers that ``compare`` trains with: built in, the task's, libraries', a user's own."""

import inspect
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.studies.compare.schema import BASELINE, OWN, Settings, Traits
from steadygrad.tasks import Task, load_function
from steadygrad.tasks.check import reason

Maker = Callable[..., Optimizer]


@dataclass(frozen=True)
class Entry:
    """One optimizer."""

    lr: float  # default learning rate
    make: Maker  # `(model, lr) -> optimizer`
    traits: Traits = field(default_factory=Traits)  # as the plan has them

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
        optimizer = self.make(model, lr)
        getattr(optimizer, "train", lambda: None)()
        return optimizer


def _plain(kind: Maker, model: nn.Module, lr: float) -> Optimizer:
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
    """Torch's Muon for matrices; AdamW for all else, embeddings and the last layer included.

    Its steps are as long as AdamW's, so that one learning rate serves both.
    """
    linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    tables |= set(map(id, linear[-1:]))
    params = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in params if p.ndim == 2 and id(p) not in tables]
    if not matrices:
        raise InputError(
            "Muon needs a matrix beside embeddings and the last layer. Found none in the model. "
            "Remedy: --optimizers without it."
        )
    others = [p for p in params if p.ndim != 2 or id(p) in tables]
    options: Any = {"lr": lr, "weight_decay": 0.1}
    muon = torch.optim.Muon(matrices, momentum=0.95, adjust_lr_fn="match_rms_adamw", **options)
    return Joined(muon, *([torch.optim.AdamW(others, **options)] if others else []))


# With their default learning rates.
_BUILT_IN: Mapping[str, Entry] = {
    BASELINE: Entry(1e-3, partial(_plain, torch.optim.AdamW)),
    "scaledadam": Entry(3e-2, partial(_plain, ScaledAdam)),
    "lans": Entry(1e-3, partial(_plain, LANS)),
    "lamb": Entry(1e-3, partial(_plain, LAMB)),
    "sgd": Entry(0.1, partial(_plain, partial(torch.optim.SGD, momentum=0.9))),
    "muon": Entry(1e-3, _muon),
}


def entries_of(settings: Settings, task: Task, files: Mapping[str, str] = {}) -> dict[str, Entry]:
    """The optimizers that a study compares, AdamW first, by name.

    The functions of ``--add`` are at ``files``. Default: as they are named.
    """
    known = {**_BUILT_IN, OWN: Entry(task.lr, task.optimizer)}
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
        found[name] = known[name] if name in known else _found(name, task.lr)
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


def _added(spec: str) -> Maker:
    path, _, name = spec.rpartition(":")
    if not os.path.isfile(os.path.expanduser(path)) or not name.isidentifier():
        raise InputError(
            "--add should name a function in a file that is there, as path/file.py:make_optimizer. "
            f"Found {spec!r}. Remedy: check the path, relative to {Path.cwd()}."
        )
    return load_function(spec)


def _found(spec: str, other: float) -> Entry:
    """The entry of a library's class or, in timm, of what its factory makes of a name.

    Where the class has no default learning rate, that is the ``other``.
    """
    package, _, name = spec.partition(":")
    try:
        module = import_module(f"{package}.optim" if package in ("torch", "timm") else package)
        kind: Any = getattr(module, name, None)
        if package == "timm":
            kind = partial(module.create_optimizer_v2, opt=name)
        elif not isinstance(kind, type) or not issubclass(kind, Optimizer):
            raise TypeError("no such class of optimizers")
        lr = kind([torch.nn.Parameter(torch.zeros(2, 2))]).param_groups[0].get("lr")
    # Whatever the library raises, at import or of its own checks.
    except Exception as error:
        raise InputError(
            "--optimizers should name an optimizer of parameters as module:Class, such as "
            f"schedulefree:AdamWScheduleFree. Found {spec!r}: {reason(error)}. Remedy: check the "
            "name, and that the library is installed; --add takes a function of your own."
        ) from error
    has_rate = isinstance(lr, (int, float)) and lr > 0
    return Entry(float(lr) if has_rate else other, partial(_plain, kind))


def traits_of(name: str, optimizer: Optimizer) -> Traits:
    """The traits that an optimizer's object shows: a schedule and a rate of its own."""
    release = ""
    if ":" in name:
        packages = packages_distributions().get(re.split("[:.]", name)[0])
        if packages is None:
            # A resumed run would not find it, nor see that it has changed.
            raise InputError(
                f"--optimizers should name classes of installed packages. Found {name!r}, in a "
                "file of your own. Remedy: --add path/file.py:make_optimizer."
            )
        release = version(packages[0])
    return Traits(
        version=release,
        own_schedule=all(callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")),
        # D-Adaptation and its kin begin with an estimate d0 of the distance to the solution.
        own_rate="d0" in inspect.signature(type(optimizer)).parameters,
    )
