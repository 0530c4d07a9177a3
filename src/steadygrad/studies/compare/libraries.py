"""Optimizers of other libraries by name, such as ``timm:adan`` and ``pytorch_optimizer:SOAP``."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions, version
from typing import Any

import torch
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.studies.compare.schema import Traits
from steadygrad.tasks.guard import reason

# Modules with the optimizers of a package, where they are not the package itself.
HOMES = {"torch": "torch.optim", "timm": "timm.optim"}


def find(spec: str, other: float) -> tuple[Callable[..., Optimizer], float]:
    """The maker ``(parameters, lr=...) -> optimizer`` of a name, and its default learning rate.

    It is a class, or in timm what its factory makes of a name. Where it has no rate of its own,
    the rate is the ``other``.
    """
    package, _, name = spec.partition(":")
    try:
        module = import_module(HOMES.get(package, package))
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
    return kind, float(lr) if isinstance(lr, (int, float)) and lr > 0 else other


def traits_of(name: str, optimizer: Optimizer, *, matrices: bool) -> Traits:
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
    has = [callable(getattr(optimizer, mode, None)) for mode in ("train", "eval")]
    return Traits(
        version=release,
        own_schedule=all(has),
        # D-Adaptation and its kin begin with an estimate d0 of the distance to the solution.
        own_rate="d0" in inspect.signature(type(optimizer)).parameters,
        matrices=matrices,
    )
