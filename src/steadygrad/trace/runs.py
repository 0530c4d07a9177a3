"""Reads the traces of a run, and adds up what its processes saw."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

from steadygrad._checks import InputError
from steadygrad._files import read_json
from steadygrad.trace.equations import PROJECTIONS, distance
from steadygrad.trace.record import AFTER
from steadygrad.trace.sketches import Key

__all__ = ["Run", "Step", "Value", "read_run"]

FORWARD = ("data", "input", "output")
Count = Annotated[int, Meta(ge=0, lt=2**62)]
Number = Annotated[float, Meta(ge=-1e300, le=1e300)]


class Record(Struct):
    """A sketch in a file, as ``Sketch`` describes it; ``z`` is absent where it is not finite.

    ``same``: it is what this process ended the file before with.
    """

    kind: str
    name: str = ""
    part: str = ""
    call: Count = 0
    type: str = ""
    count: Count = 0
    rows: Count = 0
    bad: Count = 0
    copy: bool = False
    drew: bool = False
    same: bool = False
    maker: str = ""
    took: list[Count] = []
    since: Count = 0
    noise: Number = 0.0
    z: Annotated[list[Number], Meta(min_length=PROJECTIONS, max_length=PROJECTIONS)] | None = None
    square: Annotated[float, Meta(ge=0, le=1e300)] = 0.0


class File(Struct):
    """A step of one process."""

    schema: Literal[1]
    step: Count
    rank: Count
    world: Annotated[int, Meta(ge=1, lt=2**31)]
    passes: Count
    torch: str
    random: Mapping[str, str]
    options: Sequence[Mapping[str, Any]]
    records: list[Record]


@dataclass(eq=False)
class Value:
    """A tensor of a step, whole: over all processes and micro-batches.

    Attributes:
        z: Projections; None if it is not finite.
        norm: Norm; of a mean over rows, the root of the rows' mean square.
        count: Number of elements; of a mean over rows, in each.
        noise: Relative distance that a rounding of the weights makes; 0: not measured.
        spread: Largest relative distance of a process's copy from the first one.
        scalar: Whether it is one number of each micro-batch.
    """

    type: str
    z: list[float] | None
    norm: float
    count: float
    took: Sequence[int] = ()
    since: int = 0
    drew: bool = False
    noise: float = 0.0
    spread: float = 0.0
    scalar: bool = False
    maker: str = ""


@dataclass(eq=False)
class Step:
    """A step of a run, whole; values are in the order of computation."""

    number: int
    world: int
    passes: int
    torch: str
    random: list[Mapping[str, str]]
    options: Sequence[Mapping[str, Any]]
    values: dict[Key, Value]


@dataclass(eq=False)
class Run:
    """The traced steps of a run, by number."""

    folder: Path
    steps: dict[int, Step]
    remarks: list[str] = field(default_factory=list)


def read_run(folder: Path, rename: Sequence[tuple[str, str]] = ()) -> Run:
    """Reads the traces of a run.

    Args:
        folder: The folder that ``Trace`` was given.
        rename: Patterns of names, with ``*`` for any text, and the names that take their place.

    Raises:
        InputError: If there is none, or a file is damaged.
    """
    paths = sorted(folder.glob("step-*-rank-*.json")) if folder.is_dir() else []
    if not paths:
        raise InputError(
            f"Expected a folder of traces. Found none in {folder}. Remedy: the folder that "
            "Trace(model, optimizer, folder) was given."
        )
    files, after = dict[int, list[File]](), dict[int, dict[Any, Record]]()
    for path in paths:
        file = _file(path)
        _fill_in(file, after.get(file.rank, {}))
        after[file.rank] = {(r.kind, r.name, r.part): r for r in file.records}
        files.setdefault(file.step, []).append(file)
    run = Run(folder, {})
    for number, some in sorted(files.items()):
        world = some[0].world
        if [file.rank for file in some] != [*range(world)]:
            missing = sorted({*range(world)} - {file.rank for file in some})
            run.remarks.append(
                f"{folder}: step {number} is left out, without the files of ranks {missing[:8]}."
            )
            continue
        run.steps[number] = _joined(some, rename)
    return run


def _file(path: Path) -> File:
    try:
        return convert(read_json(path), File, strict=False)
    except (OSError, ValueError, ValidationError) as error:
        raise InputError(
            f"Expected a trace of a step. Found {path}: {error}. Remedy: trace it again, or remove "
            "the file."
        ) from error


def _fill_in(file: File, before: Mapping[Any, Record]) -> None:
    """Puts values in place of those that are the same as after the file before."""
    for i, one in enumerate(file.records):
        found = before.get((AFTER.get(one.kind), one.name, one.part)) if one.same else one
        file.records[i] = replace(found, kind=one.kind) if found else one
    file.records = [one for one in file.records if not one.same]


def _joined(files: Sequence[File], rename: Sequence[tuple[str, str]]) -> Step:
    first = files[0]
    rows = dict[Key, list[Record]]()
    for file in files:
        for one in file.records:
            key = Key(one.kind, _renamed(one.name, rename), one.part, one.call)
            rows.setdefault(key, []).append(one)
    values = {key: _value(key.kind, some, first) for key, some in rows.items()}
    return Step(
        first.step, first.world, first.passes, first.torch,
        [file.random for file in files], first.options, values,
    )  # fmt: skip


def _value(kind: str, some: Sequence[Record], file: File) -> Value:
    first, own = some[0], [one for one in some if not one.copy] or [some[0]]
    # Gradients of processes are averaged: each has a share of the whole loss's.
    parts = file.world if kind in ("signal", "loss") else 1
    rows, count = sum(one.rows for one in own) or 1, sum(one.count for one in own)
    finite = [one.z for one in own if one.z is not None]
    z = None
    if len(finite) == len(own):
        z = [sum(column) / rows / parts for column in zip(*finite, strict=True)]
    norm = math.sqrt(sum(one.square for one in own) / rows) / parts
    if z is not None and not norm:
        # Squares of the smallest numbers are zero.
        norm = distance(z, [0.0] * PROJECTIONS)
    spread = 0.0
    # A buffer, as running statistics, is every process's own.
    if first.part != "buffer" and len(own) == 1 and first.z is not None and norm:
        copies = [one.z for one in some if one.copy]
        spread = max((distance(z, first.z) / norm if z else math.inf for z in copies), default=0.0)
    return Value(
        first.type, z, norm, count / rows, first.took, first.since, any(one.drew for one in some),
        max(one.noise for one in some), spread,
        count == rows == file.passes * file.world, first.maker,
    )  # fmt: skip


def _renamed(name: str, rename: Sequence[tuple[str, str]]) -> str:
    """The name in place of one that a pattern fits; ``old.*`` fits ``old`` as well."""
    for pattern, new in rename:
        found = re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), f"{name}.")
        found = found or re.fullmatch("(.*)".join(map(re.escape, pattern.split("*"))), name)
        if found:
            parts = iter(found.groups())
            pieces = (next(parts, "") if x == "*" else x for x in re.split(r"(\*)", new))
            return "".join(pieces).rstrip(".")
    return name
