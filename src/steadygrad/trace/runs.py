"""Reads the traces of a run, and adds up what its processes saw."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace

from steadygrad._checks import InputError
from steadygrad._files import read_json
from steadygrad.trace.equations import PROJECTIONS, distance
from steadygrad.trace.sketches import Key

FORWARD = ("data", "input", "output")
Count = Annotated[int, Meta(ge=0, lt=2**62)]
# Their squares have a number.
Number = Annotated[float, Meta(ge=-1e150, le=1e150)]


class Value(Struct):
    """A tensor of a step: what a process saw, as ``Sketch`` describes it; or the whole.

    Attributes:
        z: Projections; of a whole mean over rows they are the mean's.
        count: Number of elements; of a whole mean over rows, in each.
        noise: Relative distance that a rounding of the weights makes; 0: not measured.
        norm: Norm of the whole; of a mean over rows, the root of the rows' mean square.
        spread: Largest relative distance of a process's copy from the first one.
        scalar: Whether it is one number of each micro-batch.
    """

    kind: str
    z: Annotated[list[Number], Meta(min_length=PROJECTIONS, max_length=PROJECTIONS)]
    name: str = ""
    part: str = ""
    call: Count = 0
    type: str = ""
    count: Count = 0
    rows: Count = 0
    batch: Count = 0
    bad: Count = 0
    copy: bool = False
    drew: bool = False
    jumps: bool = False
    maker: str = ""
    took: list[Count] = []
    since: Count = 0
    noise: Number = 0.0
    square: Annotated[float, Meta(ge=0, le=1e300)] = 0.0
    norm: Number = 0.0
    spread: Number = 0.0
    scalar: bool = False


class Group(Struct):
    """Options of some parameters of an optimizer."""

    parameters: list[str]
    options: Mapping[str, Any]


class Step(Struct):
    """A step of one process in a file; or of all, where ``values`` are in the order of computation.

    ``generators`` are digests of each process.
    """

    schema: Literal[1]
    step: Count
    rank: Count
    world: Annotated[int, Meta(ge=1, lt=2**20)]
    passes: Count
    torch: str
    random: list[str]
    options: list[Group]
    records: list[Value]
    values: dict[Key, Value] = {}
    generators: list[list[str]] = []


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
        InputError: If there is none, a file is damaged, a pattern fits no name, or two names become
            one.
    """
    steps = dict[int, list[Step]]()
    for path in sorted(folder.glob("step-*-rank-*.json")) if folder.is_dir() else []:
        try:
            file = convert(read_json(path), Step)
        except (OSError, ValueError, ValidationError) as error:
            raise InputError(
                f"Expected a trace of a step. Found {path}: {error}. Remedy: trace it again, or "
                "remove the file."
            ) from error
        steps.setdefault(file.step, []).append(file)
    if not steps:
        raise InputError(
            f"Expected a folder of traces. Found none in {folder}. Remedy: the folder that "
            "Trace(model, optimizer, folder) was given."
        )
    run, names = Run(folder, {}), _renamed(steps, rename)
    for number, files in sorted(steps.items()):
        ranks = {*range(files[0].world)}
        if missing := sorted(ranks - {file.rank for file in files}):
            run.remarks.append(
                f"{folder}: step {number} is left out, without the files of ranks {missing[:8]}."
            )
            continue
        rows = dict[Key, list[Value]]()
        for one in (one for file in files for one in file.records):
            key = Key(one.kind, names[one.name], one.part, one.call)
            rows.setdefault(key, []).append(one)
        run.steps[number] = replace(
            files[0],
            values={key: _value(some, files[0]) for key, some in rows.items()},
            generators=[file.random for file in files],
            options=[
                Group([names.get(name, name) for name in group.parameters], group.options)
                for group in files[0].options
            ],
        )
    return run


def _value(some: Sequence[Value], file: Step) -> Value:
    first, own = some[0], [one for one in some if not one.copy] or [some[0]]
    # Gradients of processes are averaged: each has a share of the whole loss's.
    parts = file.world if first.kind in ("signal", "loss") else 1
    rows, count = sum(one.rows for one in own) or 1, sum(one.count for one in own)
    z = [sum(x) / rows / parts for x in zip(*(one.z for one in own), strict=True)]
    # Squares of the smallest numbers are zero.
    norm = math.sqrt(sum(one.square for one in own) / rows) / parts
    # Of a mean of losses, too, the projections tell the size.
    norm = size(z) if not norm or first.kind == "loss" else norm
    spread = 0.0
    # A buffer, as running statistics, is every process's own.
    if first.part != "buffer" and len(own) == 1 and norm:
        copies = [one.z for one in some if one.copy]
        spread = max((distance(z, first.z) / norm for z in copies), default=0.0)
    return replace(
        first, z=z, norm=norm, count=count / rows, rows=rows, bad=sum(one.bad for one in own),
        drew=any(one.drew for one in some), jumps=any(one.jumps for one in some),
        noise=max(one.noise for one in some), spread=spread,
        scalar=count == rows == file.passes * file.world,
    )  # fmt: skip


def size(z: Sequence[float]) -> float:
    """Estimate of a norm."""
    return distance(z, [0.0] * PROJECTIONS)


def _renamed(
    steps: Mapping[int, Sequence[Step]], rename: Sequence[tuple[str, str]]
) -> Mapping[str, str]:
    """Names in place of those that patterns fit; ``old.*`` fits ``old`` as well."""
    found = {one.name: one.name for files in steps.values() for f in files for one in f.records}
    left = [*found]
    for pattern, new in rename:
        old, parts = "(.*)".join(map(re.escape, pattern.split("*"))), new.split("*")
        fits = {n: re.fullmatch(old, f"{n}.") or re.fullmatch(old, n) for n in left if n}
        if not any(fits.values()):
            raise InputError(
                f"Parameter `rename` should fit a name of A. Found {pattern!r}, which fits none. "
                f"Remedy: one of its names, such as {max(found)!r}, with * for any text."
            )
        for name, fit in fits.items():
            if fit:
                left.remove(name)
                texts = zip([*fit.groups(), *[""] * len(parts)], parts[1:], strict=False)
                found[name] = (parts[0] + "".join(map("".join, texts))).rstrip(".")
    new_names = Counter(found.values())
    if twice := [name for name, count in new_names.items() if count > 1]:
        raise InputError(
            f"Parameter `rename` should keep names apart. Found {twice[0]!r} twice. Remedy: a "
            "pattern with a * for what differs."
        )
    return found
