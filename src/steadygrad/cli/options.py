"""The commands' options. Their texts are the program's help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import Positional, arg

__all__ = ["Advise", "Report", "parse"]

Device = Literal["auto", "cpu", "cuda"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]

DESCRIPTION = (
    "Measures what a PyTorch training loop does to a gradient between backward() and the weights. "
    "`steadygrad --version` tells the version."
)


def _arg(metavar: str, default: str = "") -> Any:
    """How the help shows an option whose default is not a value of its own."""
    return arg(metavar=metavar, help_behavior_hint=f"(default: {default})" if default else "")


@dataclass(frozen=True)
class Advise:
    """Which batch size to train at: noise scale, and critical batch size measured by branches."""

    task: Annotated[Positional[str | None], _arg("TASK", "char-lm")] = None
    """What to train: char-lm, digits-classifier, digits-autoencoder, or
    path/to/file.py:make_task."""
    budget: Annotated[str | None, _arg("TIME", "5m")] = None
    """Time for the whole study: 30s, 5m, 2h."""
    seed: Annotated[int | None, _arg("INT", "0")] = None
    """Of everything random."""
    out: Annotated[Path | None, _arg("FOLDER", "runs/advise-DATE-TIME")] = None
    """Folder of the run; absent or empty."""
    device: Annotated[Device | None, _arg("auto|cpu|cuda", "auto")] = None
    """auto is CUDA where there is one."""
    dtype: Annotated[Dtype | None, _arg("float32|bfloat16|float16|float64", "float32")] = None
    """bfloat16 and float16 by autocast."""
    tolerance: Annotated[float | None, _arg("FRACTION", "0.2")] = None
    """Extra samples that are acceptable, as a fraction."""
    resume: Annotated[Path | None, _arg("RUN")] = None
    """Go on with the run in this folder, with its own settings."""
    json: bool = False
    """Print the summary as JSON on stdout, and everything else on stderr."""
    debug: bool = False
    """Show the traceback of an error."""


@dataclass(frozen=True)
class Report:
    """Draw a run's report again."""

    run: Annotated[Positional[Path], _arg("RUN")]
    """Folder of the run."""
    debug: bool = False
    """Show the traceback of an error."""


def parse(arguments: list[str]) -> Advise | Report:
    """Reads the command line; ends the process with its own message on ``--help`` and errors."""
    return tyro.cli(
        Advise | Report,
        prog="steadygrad",
        description=DESCRIPTION,
        args=arguments,
        config=(tyro.conf.FlagCreatePairsOff,),
    )
