"""Audiocraft's own `Balancer`, for side-by-side runs.

Needs `pip install --no-deps audiocraft flashy` in a throw-away environment: the class lies in one
file, which is loaded alone, because the package around it wants a hundred others.
"""

import importlib.util
import sys
import types
from pathlib import Path
from typing import Any

__all__ = ["load_balancer"]


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(next(iter(spec.submodule_search_locations))) if spec else None


def _load(name: str, path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _dora() -> dict[str, types.ModuleType]:
    """The function of dora that flashy calls in one process: it says that the process is alone."""
    distrib: Any = types.ModuleType("dora.distrib")
    distrib.rank, distrib.world_size, distrib.init = lambda: 0, lambda: 1, lambda *_: None
    return {"dora": types.ModuleType("dora"), "dora.distrib": distrib}


def load_balancer() -> type | None:
    """The class, or None where audiocraft and flashy are not installed."""
    audiocraft, flashy = _folder("audiocraft"), _folder("flashy")
    if audiocraft is None or flashy is None:
        return None
    before = dict(sys.modules)
    try:
        sys.modules.update(_dora())
        package: Any = types.ModuleType("flashy")
        package.averager = _load("flashy.utils", flashy / "utils.py").averager
        package.distrib = _load("flashy.distrib", flashy / "distrib.py")
        sys.modules["flashy"] = package
        return _load("audiocraft_balancer", audiocraft / "losses" / "balancer.py").Balancer
    finally:
        for name in ("dora", "dora.distrib", "flashy"):
            sys.modules.pop(name, None)
            if name in before:
                sys.modules[name] = before[name]
