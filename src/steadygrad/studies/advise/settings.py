"""What a user chooses for a study."""

from dataclasses import dataclass

import torch

from steadygrad._checks import check_choice, check_count, check_number
from steadygrad.record import Run, check_run
from steadygrad.studies.choices import resolve_device, study_of
from steadygrad.studies.engine import DTYPES

__all__ = ["Settings", "read_settings"]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a user chooses.

    Attributes:
        task: A built-in task's name, or ``path/file.py:make_task``.
        budget_seconds: Wall-clock time for the study; it also decides how much work is planned.
        seed: Of initialisation, data orders and intervals.
        device: ``"cpu"``, ``"cuda"`` or ``"auto"``.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``.
        tolerance: Extra samples that are acceptable, as a fraction.
    """

    task: str = "char-lm"
    budget_seconds: float = 300.0
    seed: int = 0
    device: str = "auto"
    dtype: str = "float32"
    tolerance: float = 0.2

    def __post_init__(self) -> None:
        check_number("budget_seconds", self.budget_seconds, low=0, low_open=True)
        check_count("seed", self.seed, low=0)
        check_number("tolerance", self.tolerance, low=0.01, high=1)
        check_choice("device", self.device, ("auto", "cpu", "cuda"))
        check_choice("dtype", self.dtype, tuple(DTYPES))

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
    study_of(recorded, "advise")
    check_run(recorded, to_resume=True)
    header = recorded.header
    kept = header["settings"]
    return Settings(
        task=header["task"]["spec"],
        seed=header["seed"],
        **{name: kept[name] for name in ("budget_seconds", "device", "dtype", "tolerance")},
    )
