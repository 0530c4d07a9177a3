"""Machine, packages and versions that a run was measured with."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from steadygrad import __version__


def environment(accelerator: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Describes machine, packages and versions; loads no torch, which knows the accelerator."""
    found = {
        "python": platform.python_version(),
        "steadygrad": __version__,
        "torch": None,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": None,
        **(accelerator or {}),
    }
    with suppress(PackageNotFoundError):
        found["torch"] = version("torch")
    with suppress(AttributeError):  # absent on macOS and Windows
        found["cores"] = len(os.sched_getaffinity(0))
    # Windows has no sysconf, and some systems not these names.
    with suppress(AttributeError, ValueError, OSError):
        found["memory_bytes"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return found


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"
