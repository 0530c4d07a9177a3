"""What the settings of all studies have in common."""

import torch

from steadygrad._checks import InputError
from steadygrad.record import Run

__all__ = ["resolve_device", "study_of"]


def resolve_device(name: str) -> torch.device:
    """The device that ``"auto"``, ``"cpu"`` or ``"cuda"`` stands for here.

    Raises:
        InputError: If CUDA was asked for and is not there.
    """
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise InputError("The device cuda should be available. Found none. Remedy: --device cpu.")
    return torch.device("cuda" if there and name != "cpu" else "cpu")


def study_of(recorded: Run, study: str) -> None:
    """Checks that a record is one of this study.

    Raises:
        InputError: If it is of another.
    """
    found = recorded.header.get("study")
    if found != study:
        raise InputError(
            f"Expected a record of `steadygrad {study}`. Found {found!r} in "
            f"{str(recorded.folder)!r}. Remedy: another folder for --resume."
        )
