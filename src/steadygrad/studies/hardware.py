"""What only torch knows of the machine, for a record that is made without it."""

from typing import Any

import torch

__all__ = ["accelerator"]


def accelerator(device: torch.device) -> dict[str, Any]:
    """Describes the GPU that a study runs on; empty where it runs on none.

    Args:
        device: This process's device.

    Returns:
        ``gpu`` (its name), ``gpu_memory_bytes``, and ``cuda``, the version that torch was built
        with, or ``hip`` in its place.
    """
    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    library = {"hip": torch.version.hip} if torch.version.hip else {"cuda": torch.version.cuda}
    return {"gpu": found.name, "gpu_memory_bytes": found.total_memory, **library}
