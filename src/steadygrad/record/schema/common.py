"""Settings that all studies share. They are the command line, and a part of the header."""

from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta

__all__ = ["FREE", "TASKS", "CommonSettings"]

# Settings that --resume may change: they decide when a study ends, not its numbers.
FREE = ("budget", "workers", "dask")
# Names of the built-in tasks.
TASKS = ("char-lm", "digits-classifier", "digits-autoencoder", "digits-deep")


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings of every study; a field's description is the command line's help."""

    task: Annotated[
        str,
        Meta(
            min_length=1,
            description=f"Task to train: {', '.join(TASKS)}, or path/to/file.py:make_task.",
        ),
    ] = "char-lm"
    budget: Annotated[
        float,
        Meta(
            gt=0,
            lt=1e9,
            description="Time for the whole study: 30s, 5m, 2h. With --resume: time from now on.",
        ),
    ] = 300.0
    seed: Annotated[int, Meta(ge=0, lt=1 << 62, description="Random seed.")] = 0
    device: Annotated[
        Literal["auto", "cpu", "cuda", "mps"],
        Meta(description="Device to train on; auto prefers CUDA, then the CPU."),
    ] = "auto"
    workers: Annotated[
        int,
        Meta(
            ge=0,
            le=1024,
            description="Processes that run trials side by side, one device each. 0 or auto: as "
            "many as a quick measurement shows to be faster.",
        ),
    ] = 0
    threads: Annotated[
        int,
        Meta(
            ge=0,
            le=4096,
            description="CPU threads of each trial. 0 or auto: the cores over the workers.",
        ),
    ] = 0
    dask: Annotated[
        str, Meta(description="Address of a Dask scheduler, HOST:PORT, that runs the trials.")
    ] = ""
    sharding: Annotated[
        Literal["ddp", "fsdp2"],
        Meta(description="How torchrun's processes share the model."),
    ] = "ddp"
