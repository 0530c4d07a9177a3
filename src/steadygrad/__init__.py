"""Everything a PyTorch training loop does to a gradient between ``backward()`` and the weights.

The tools live in subpackages (``steadygrad.noise`` and others); the names below are loaded when
first touched, so that ``import steadygrad`` stays free of torch.
"""

from importlib import import_module
from typing import Any

__version__ = "0.2.0"

_HOMES = {
    "NoiseScale": "steadygrad.noise",
    "SplitBatchNoiseScale": "steadygrad.noise",
    "LossBalancer": "steadygrad.balance",
    "GradientWatch": "steadygrad.watch",
    "LayerwiseGradScaler": "steadygrad.scale",
    "ScaledAdam": "steadygrad.optim",
    "LAMB": "steadygrad.optim",
    "LANS": "steadygrad.optim",
    "Task": "steadygrad.tasks",
    "advise": "steadygrad.cli.studies",
    "compare": "steadygrad.cli.studies",
    "inspect": "steadygrad.cli.studies",
    "ab": "steadygrad.cli.studies",
}

__all__ = [
    "LAMB",
    "LANS",
    "GradientWatch",
    "LayerwiseGradScaler",
    "LossBalancer",
    "NoiseScale",
    "ScaledAdam",
    "SplitBatchNoiseScale",
    "Task",
    "__version__",
    "ab",
    "advise",
    "compare",
    "inspect",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steadygrad' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
