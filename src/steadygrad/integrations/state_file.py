"""A file with the tools' states beside a trainer's own checkpoint."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from steadygrad._checks import InputError

__all__ = ["load_states", "save_states"]


def save_states(path: Path, states: Mapping[str, Any]) -> None:
    """Writes states beside the file and renames it into place."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        torch.save(dict(states), beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def load_states(path: Path) -> dict[str, Any]:
    """Reads a file of :func:`save_states`; no pickled object is made.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        states = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(
            f"Expected states of steadygrad's tools in {str(path)!r}. Found a file that cannot be "
            f"read ({reason}). Remedy: another checkpoint, or delete it to start the tools afresh."
        ) from error
    if not isinstance(states, dict):
        raise InputError(
            f"Expected states by name in {str(path)!r}. Found {type(states).__name__}. "
            "Remedy: delete it to start the tools afresh."
        )
    return states
