"""A made-up but realistic `advise` run, whole or cut short, and a way to look at its page."""

import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from msgspec.structs import replace

from steadygrad.studies import charts
from steadygrad.studies.advise.schema import (
    Branch,
    Header,
    Noise,
    Plan,
    Point,
    Scratch,
    Settings,
    Stage,
)
from steadygrad.studies.advise.summary import summarize
from steadygrad.studies.advise.trials import end_marks, run_marks
from steadygrad.studies.folder import SCHEMA, Results, Run
from steadygrad.studies.html import Html
from steadygrad.studies.page import render
from steadygrad.studies.schema import Result, Runtime, TaskInfo
from tests.unit.studies.results import write

POINTS = (384, 1_536, 6_144, 24_576)
LENGTHS = (1_024, 1_024, 3_072, 12_288)
MULTIPLES = (1, 2, 4, 8, 16, 32)
BATCH, RATE = 8, 1e-3
# A batch of B needs (B + T) / (8 + T) times the samples of 8: at 20%, B is 35.6 to 149.6.
TRUTH = (130.0, 300.0, 480.0, 700.0)
FRACTIONS = (0.25, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
STAGES = ((0, 16), (384, 32), (1_536, 64))
# Sample overhead of the runs from scratch, by their last batch size.
OVERHEADS = {8: 0.0, 16: 0.12, 32: 0.31, 64: 0.08}

TASK = TaskInfo(
    spec="char-lm",
    name="char-lm",
    sample="sequence",
    batch_size=BATCH,
    lr=RATE,
    lr_rule="sqrt",
    parameters=254_720,
    train_size=180_000,
    valid_size=256,
    optimizer="AdamW",
    beta2=0.99,
    weight_decay=0.01,
    tokens_per_sample=64,
    provenance={
        "corpus": "Python 3.11.7 standard library, 740 files",
        "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    },
)
RUNTIME = Runtime(
    device="cpu",
    dtype="float32",
    world_size=1,
    sharding="none",
    threads=1,
    micro_batch_size=64,
    workers=2,
)
PLAN = Plan(
    batch_size=BATCH,
    points=POINTS,
    branch_samples=LENGTHS,
    multiples=(MULTIPLES,) * 4,
    noise_steps=(24,) * 4,
    repeats=2,
    rates=True,
    seeds=2,
    candidates=2,
    samples_per_second=700.0,
    work=400_000,
    span=200_000,
)
HEADER = Header(
    schema=SCHEMA,
    study="advise",
    task=TASK,
    runtime=RUNTIME,
    environment={"steadygrad": "0.1.0", "torch": "2.13.0+cpu", "cpu": "AMD EPYC 7763", "cores": 2},
    time={"created": "2026-11-21T01:23:45+00:00"},
    settings=Settings(task="char-lm", budget=300.0),
    plan=PLAN,
)


def loss_at(samples: float) -> float:
    return 1.2 + 14.0 * (samples + 300) ** -0.33


def point_event(index: int, noise: random.Random) -> Point:
    start, stop = (0, *POINTS)[index : index + 2]
    seen = range(start + 80, stop + 1, 80)
    return Point(
        point=index,
        samples=stop,
        steps=stop // BATCH,
        valid_loss=loss_at(stop),
        curve=tuple((at, loss_at(at)) for at in run_marks(stop, BATCH, first=start)),
        training=tuple((at, loss_at(at) + noise.gauss(0, 0.05)) for at in seen),
    )


def noise_event(index: int) -> Noise:
    value = [21.0, 35.0, math.nan, 96.0][index]
    low, high = [(15.0, 29.0), (22.0, 71.0), (41.0, math.inf), (52.0, 410.0)][index]
    return Noise(
        point=index,
        value=value,
        low=low,
        high=high,
        grad_sq_norm=[0.061, 0.021, -0.0004, 0.0041][index],
        noise_trace=[1.28, 0.74, 0.55, 0.39][index],
        resolved=math.isfinite(value),
        measurements=24,
        effective=24.0,
        samples=24 * 64,
    )


def branch_event(index: int, repeat: int, size: int, shift: float) -> Branch:
    start, length = POINTS[index], LENGTHS[index]
    slower = (size + TRUTH[index]) / (BATCH + TRUTH[index])
    parts = (*FRACTIONS, 1.0) if size == BATCH else (1.0,)
    curve = [(round(f * length), loss_at(start + f * length / slower) + shift) for f in parts]
    # The largest batch diverges early in training.
    if index == 0 and size == 256:
        curve = [(length, math.inf)]
    return Branch(
        point=index,
        repeat=repeat,
        batch_size=size,
        lr=RATE * math.sqrt(size / BATCH),
        steps=length // size,
        samples=length,
        loss=curve[-1][1],
        curve=tuple(curve),
    )


def scratch_event(
    purpose: Any, repeat: int, rate: float, stages: tuple[tuple[int, int], ...], shift: float
) -> Scratch:
    size = stages[-1][1]
    length = POINTS[-1]
    slower = 1 + (OVERHEADS[size] if rate == 1 else 0.3)
    ends = end_marks(length, BATCH)
    way = [at for at in run_marks(length, BATCH) if at < ends[0]] if size == BATCH else []
    curve = [(at, loss_at(at / slower) + shift) for at in (*way, round(fmean(ends)))]
    return Scratch(
        purpose=purpose,
        repeat=repeat,
        batch_size=size,
        rate=rate,
        stages=tuple(
            Stage(from_samples=at, batch_size=b, lr=rate * RATE * math.sqrt(b / BATCH))
            for at, b in stages
        ),
        warmup_samples=0 if size == BATCH else POINTS[0],
        steps=length // size if len(stages) == 1 else 420,
        samples=curve[-1][0],
        loss=curve[-1][1],
        curve=tuple(curve),
    )


def events(points: int = len(POINTS)) -> Iterator[Result]:
    """The events up to and including a point of training; with all points, runs from scratch."""
    noise = random.Random(0)
    for index in range(points):
        yield point_event(index, noise)
        yield noise_event(index)
        for repeat in range(2):
            shift = noise.gauss(0, 0.003)
            for k in MULTIPLES:
                each = shift + noise.gauss(0, 0.0005)
                yield branch_event(index, repeat, k * BATCH, each)
    if points == len(POINTS):
        for rate in (0.5, 2.0):
            yield scratch_event("constant", 0, rate, ((0, BATCH),), 0.0)
        for purpose, first, stages in (
            ("constant", 1, ((0, 8),)),
            ("constant", 0, ((0, 16),)),
            ("constant", 0, ((0, 32),)),
            ("schedule", 0, STAGES),
        ):
            for repeat in range(first, 2):
                yield scratch_event(purpose, repeat, 1.0, stages, noise.gauss(0, 0.002))


MakeRun = Callable[..., Run]


def write_run(
    folder: Path,
    *,
    points: int = len(POINTS),
    status: str | None = "complete",
    task: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
    edit: Callable[[list[Result]], list[Result]] | None = None,
    summary: Callable[[dict[str, Any]], None] | None = None,
) -> Run:
    """Writes a run with the summary that the study itself would write, and reads it back.

    Args:
        folder: Replaced if it is there.
        points: Points of training that were reached.
        status: None leaves out the summary.
        task: Fields of the task to replace.
        settings: Fields of the settings to replace.
        edit: Changes the events, before they are summarized.
        summary: Changes the summary in place.
    """
    header = replace(
        HEADER,
        task=replace(TASK, **(task or {})),
        settings=Settings(**{"task": "char-lm", "budget": 300.0, **(settings or {})}),
    )
    found = list(events(points))
    if edit is not None:
        found = edit(found)
    if folder.exists():
        shutil.rmtree(folder)
    total = None
    if status is not None:
        total = {"schema": SCHEMA, "study": "advise", "status": status}
        total |= summarize(header, Results(found), status)
        if summary is not None:
            summary(total)
    return write(folder, *found, header=header, summary=total)


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """:func:`write_run` into a folder of the test's own."""

    def make(points: int = len(POINTS), status: str | None = "complete", **changes: Any) -> Run:
        return write_run(tmp_path / "run", points=points, status=status, **changes)

    return make


@pytest.fixture
def no_charts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages without drawings, for tests of what they say: drawing takes seconds."""
    monkeypatch.setattr(charts, "_svg", lambda *_, **__: Html(""))


@pytest.fixture(scope="session")
def whole_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The whole run, unchanged."""
    return write_run(tmp_path_factory.mktemp("whole") / "run")


@pytest.fixture(scope="session")
def whole_page(whole_run: Run) -> str:
    """The page of the whole run, with its drawings."""
    return render(whole_run)
