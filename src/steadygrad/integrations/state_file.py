"""A file with the tools' states beside a trainer's own checkpoint."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.studies.folder import open_file, replace_file

__all__ = ["load_states", "save_states"]


def save_states(path: Path, states: Mapping[str, Any]) -> None:
    """Writes states beside the file and renames it into place."""
    data = io.BytesIO()
    torch.save(dict(states), data)
    replace_file(path, data.getvalue())


def load_states(path: Path) -> dict[str, Any]:
    """Reads a file of :func:`save_states`; no pickled object is made.

    Raises:
        InputError: If it cannot be read.
    """
    try:
        with open_file(path) as file:
            return dict(torch.load(file, map_location="cpu", weights_only=True))
    except Exception as error:
        reason = " ".join(str(error).split())[:80]
        raise InputError(
            f"Expected states of steadygrad's tools in {str(path)!r}. Found a file that cannot be "
            f"read ({reason}). Remedy: another checkpoint, or delete it to start the tools afresh."
        ) from error
