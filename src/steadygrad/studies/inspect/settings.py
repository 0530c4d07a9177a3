"""What a user chooses for a study of float16."""

from dataclasses import dataclass

import torch

from steadygrad._checks import check_choice, check_count, check_number
from steadygrad.record import Run, check_run
from steadygrad.studies.choices import resolve_device, study_of

__all__ = ["Settings", "read_settings"]

LEAST_STEPS = 16


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user chooses.

    Attributes:
        task: A built-in task's name, or ``path/file.py:make_task``.
        steps: Optimizer steps with one loss scale, again while scales are found, and again with
            the scales proposed.
        budget_seconds: Wall-clock time for the study; it ends there, whole or not.
        seed: Of initialisation and data orders.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
    """

    task: str = "char-lm"
    steps: int = 200
    budget_seconds: float = 300.0
    seed: int = 0
    device: str = "auto"

    def __post_init__(self) -> None:
        check_count("steps", self.steps, low=LEAST_STEPS)
        check_number("budget_seconds", self.budget_seconds, low=0, low_open=True)
        check_count("seed", self.seed, low=0)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))

    @property
    def resolved_device(self) -> torch.device:
        """The device that ``"auto"`` stands for here.

        Raises:
            InputError: If CUDA was asked for and is not there.
        """
        return resolve_device(self.device)


def read_settings(recorded: Run) -> Settings:
    """The settings that a record was made with.

    Raises:
        InputError: If it is a record of another study, or lacks what going on needs.
    """
    study_of(recorded, "inspect")
    check_run(recorded, to_resume=True)
    header = recorded.header
    kept = header["settings"]
    return Settings(
        task=header["task"]["spec"],
        seed=header["seed"],
        **{name: kept[name] for name in ("steps", "budget_seconds", "device")},
    )
