"""What a run's header records: the task, the machine, the user's files; and what has changed since.

A task and the optimizers of ``--add`` are Python functions in files. A record may be a stranger's,
and name any file: only what this user's own run recorded is taken at its word. That this user began
a run is remembered in an empty file outside of the run's folder.
"""

import hashlib
import math
import os
import platform
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

import torch

from steadygrad import __version__
from steadygrad._checks import InputError
from steadygrad._files import read_file
from steadygrad._studies import module_of
from steadygrad.studies.folder import Run, identity, replace_file
from steadygrad.studies.schema import SCHEMA, Header, Runtime, TaskInfo
from steadygrad.studies.trainer import Trainer
from steadygrad.tasks import BUILT_IN, Task, load_task, sources
from steadygrad.tasks.start import digest_of

# Packages of optimizers that `compare` imports even if only a record names them.
LIBRARIES = ("heavyball", "pytorch_optimizer", "schedulefree", "timm", "torch")
# Stands in the settings for a task that no other process can load.
OBJECT = "a Task object"


def cores() -> int:
    """Number of the machine's cores that this process may use."""
    with suppress(AttributeError):  # absent on macOS and Windows
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def memory_bytes() -> int | None:
    """The machine's memory; None where it is not known, as on Windows."""
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return None


def environment(device: torch.device) -> dict[str, Any]:
    """Machine and versions that a run is measured with."""
    found = {
        "python": platform.python_version(),
        "steadygrad": __version__,
        "torch": str(torch.__version__),  # with the build, such as +cu130
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cores": cores(),
        "memory_bytes": memory_bytes(),
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        found |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory}
    return found


def _cpu_name() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "unknown"


def describe_task(trainer: Trainer, spec: str) -> TaskInfo:
    """Describes a trainer's task, its model and its optimizer; ``spec`` names the task."""
    task, group = trainer.task, trainer.optimizer.param_groups[0]
    common = {field.name for field in fields(task)} & {*TaskInfo.__struct_fields__}
    values = {name: getattr(task, name) for name in common}
    start = {"Task.start": trainer.start_digest} if trainer.start_digest else {}
    return TaskInfo(
        **{**values, "provenance": {**task.provenance, **start}},
        spec=spec,
        dependent=trainer.dependent,
        parameters=sum(p.numel() for p in trainer.model.parameters() if p.requires_grad),
        train_size=len(task.train),
        valid_size=len(task.valid),
        optimizer=type(trainer.optimizer).__name__,
        beta2=float(group["betas"][1]) if trainer.second_moment and "betas" in group else None,
        weight_decay=float(group["weight_decay"]) if "weight_decay" in group else None,
    )


def make_header(
    study: str,
    settings: Any,
    trainer: Trainer,
    *,
    plan: Any,
    workers: int,
    files: Mapping[str, str],
) -> Header:
    """The header of a new run; ``workers`` is the number that the plan was made for."""
    context = trainer.context
    runtime = Runtime(
        device=context.device.type,
        dtype=str(trainer.dtype).removeprefix("torch."),
        world_size=context.size,
        sharding=context.sharding,
        threads=torch.get_num_threads(),
        micro_batch_size=trainer.micro_batch_size,
        workers=workers,
    )
    created = datetime.now(timezone.utc).isoformat(timespec="microseconds")
    header: Header = module_of(study, "schema").Header(
        schema=SCHEMA,
        study=study,
        task=describe_task(trainer, settings.task),
        settings=settings,
        plan=plan,
        runtime=runtime,
        environment=environment(context.device),
        files=digests(files),
        first_losses=_first_losses(trainer),
        first_value=trainer.evaluate() if trainer.task.evaluate else None,
        time={"created": created, "folder": os.getcwd()},
    )
    return header


def _first_losses(trainer: Trainer) -> tuple[float, ...]:
    """The losses before training, if a model that is made anew has them again."""
    found = []
    for _ in range(2):
        found.append(trainer.first_losses())
        trainer.restart()
    return found[0] if found[0] == found[1] else ()


def changes(header: Header, trainer: Trainer) -> list[str]:
    """Warnings about changes that may alter the last digits; refuses those that alter more."""
    then, now = header.task, describe_task(trainer, header.task.spec)
    for name in then.__struct_fields__:
        _check_same(name, getattr(then, name), getattr(now, name), "the task as it was")
    world = header.runtime.world_size, trainer.context.size
    _check_same("world_size", *world, "torchrun --nproc-per-node as before")
    before, after = header.environment, environment(trainer.context.device)
    names = {"torch": "torch", "cpu": "the processor", "gpu": "the GPU"}
    changed = [
        f"{text} was {before.get(name)} and is {after.get(name)}: the numbers may differ in the "
        "last digits."
        for name, text in names.items()
        if before.get(name) != after.get(name)
    ]
    # On another machine the last digits differ, and no more is known.
    if header.first_losses and not changed:
        losses = header.first_losses, trainer.first_losses()
        if not all(map(partial(math.isclose, rel_tol=1e-5, abs_tol=1e-9), *losses)):
            _check_same("losses before training", *losses, "the task and its data as they were")
    return changed


def _check_same(name: str, then: Any, now: Any, remedy: str) -> None:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in {**then, **now}:
            _check_same(key, then.get(key), now.get(key), remedy)
    elif then != now:
        raise InputError(
            f"Expected {name} = {then!r} as in the record. Found {now!r}. "
            f"Remedy: {remedy}, or a new run with --out."
        )


def located(settings: Any, folder: str = "", typed: Any = ()) -> dict[str, str]:
    """Absolute places of the functions in files that settings name.

    They count from ``folder``, and those of settings in ``typed`` from the present folder.
    """
    # A command, as `ab` runs it, is no function in a file.
    without = settings.task == OBJECT or getattr(settings, "metric", "")
    add = map(str.strip, getattr(settings, "add", "").split(","))
    named = {"task": [] if without else settings.words, "add": add}
    return {
        spec: str(Path("" if name in typed else folder, os.path.expanduser(spec)).absolute())
        for name, specs in named.items()
        for spec in specs
        if spec and spec not in BUILT_IN
    }


def trusted(run: Run, given: Mapping[str, Any]) -> dict[str, str]:
    """Places of the functions that a run goes on with; refused if only a stranger names them."""
    settings, study = run.header.settings, run.header.study
    add, optimizers = (getattr(settings, name, "") for name in ("add", "optimizers"))
    named = map(str.strip, optimizers.split(","))
    modules = [name for name in named if ":" in name and name.split(":")[0] not in LIBRARIES]
    metric, folder = getattr(settings, "metric", ""), str(run.header.time.get("folder", ""))
    task = bool(metric) or not {*settings.words} <= {*BUILT_IN}
    code = {"task": task, "add": add, "optimizers": modules}
    unsaid, known = any(found and name not in given for name, found in code.items()), False
    with suppress(OSError, RuntimeError):
        known = _mark(run.folder).is_file()
    if unsaid and not known:
        flags = (["--add", add] if add else []) + (["--optimizers", optimizers] if modules else [])
        words = [*settings.words, *flags, "--resume", str(run.folder)]
        read = [*located(settings), *modules] or settings.words
        raise InputError(
            "Expected a run that you began here: the record names code, and --resume runs "
            f"it. Found no trace of it. Remedy: read {', '.join(read)}; "
            f"if you trust it: steadygrad {study} {' '.join(map(quote, words))}"
        )
    # Commands would find other files there than those that were read.
    if metric and not (os.path.isdir(folder) if known else os.getcwd() == folder):
        raise InputError(
            f"Expected the folder of the record's commands, {folder!r}. Found {os.getcwd()!r}. "
            "Remedy: restore it and cd there, if you trust what the commands find in it."
        )
    return located(settings, folder, given)


def remember(folder: Path) -> None:
    """Remembers that this user began a run; where that fails, a resume has to name its files."""
    with suppress(OSError, RuntimeError, InputError):
        mark = _mark(folder)
        mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace_file(mark, b"")


def _mark(folder: Path) -> Path:
    given = os.environ.get("XDG_STATE_HOME", "")
    # A relative one would lie in whatever folder is the present one.
    home = Path(given) if os.path.isabs(given) else Path.home().absolute() / ".local/state"
    return home / "steadygrad/runs" / identity(folder)


def load(study: str, settings: Any, files: Mapping[str, str]) -> Task:
    """What the settings name; functions in files are at the places in ``files``."""
    own = getattr(module_of(study, "trials"), "load", None)
    task: Task = own(settings, files) if own else load_task(files.get(settings.task, settings.task))
    return task


def load_recorded_task(header: Any, files: Mapping[str, str]) -> Task:
    """The task of a record; refused if one of the functions' ``files`` has changed."""
    for spec, place in files.items():
        for name, digest in header.files.get(spec, {}).items():
            path = Path(place).parent / name
            if _digest(path) != digest:
                raise InputError(
                    f"Expected {str(path)!r} as it was when the run began. Found it changed or "
                    "gone. Remedy: restore it, or start a new run with --out."
                )
    # Not `header.task.spec`: only the settings were looked at before.
    task = load(header.study, header.settings, files)
    # A training that goes on may write its checkpoint anew: a worker would begin elsewhere.
    starts = {name: x for name, x in task.provenance.items() if name.endswith("Task.start")}
    if task.start:
        starts["Task.start"] = digest_of(task.start)
    for name, digest in starts.items():
        if header.task.provenance.get(name) != digest:
            raise InputError(
                f"Expected {name} as it was when the run began. Found it changed. Remedy: restore "
                "it, or start a new run with --out."
            )
    return task


def digests(files: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """SHA-256 of each function's file, and of the files beside it that were imported so far."""
    found = {spec: (Path(place).parent, sources(place)) for spec, place in files.items()}
    return {
        spec: {path.relative_to(folder).as_posix(): _digest(path) for path in paths}
        for spec, (folder, paths) in found.items()
    }


def _digest(path: Path) -> str:
    with suppress(OSError):
        return hashlib.sha256(read_file(path)).hexdigest()
    return ""
