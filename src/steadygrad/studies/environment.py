"""Machine, packages and versions that a run was measured with."""

import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from steadygrad import __version__


def environment(device: Any = None) -> Mapping[str, Any]:
    """Describes machine, packages and versions; loads no torch but for a ``torch.device``."""
    found = {
        "python": platform.python_version(),
        "steadygrad": __version__,
        "torch": None,
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": None,
    }
    if device is not None and device.type == "cuda":
        import torch

        gpu, hip = torch.cuda.get_device_properties(device), torch.version.hip
        found |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory}
        found |= {"hip": hip} if hip else {"cuda": torch.version.cuda}
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
