"""What the numbers of a run were measured with."""

import os
import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from steadygrad import __version__

__all__ = ["environment"]


def environment() -> dict[str, Any]:
    """Describes what the numbers were measured with; loads no torch.

    Returns:
        ``python``, ``steadygrad`` and ``torch`` versions (``torch`` is ``None`` when absent),
        ``platform``, ``cpu`` (its name) and ``cores`` (those this process may use).
    """
    try:
        torch_version: str | None = version("torch")
    except PackageNotFoundError:
        torch_version = None
    return {
        "python": platform.python_version(),
        "steadygrad": __version__,
        "torch": torch_version,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": _cores(),
    }


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def _cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # absent on macOS and Windows
    return len(affinity(0)) if affinity else os.cpu_count() or 1
