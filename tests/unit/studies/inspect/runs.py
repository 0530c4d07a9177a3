"""Small runs of ``inspect``; on a tiny task 16 steps of each phase take about a second."""

from pathlib import Path

from msgspec.structs import replace

from steadygrad.studies.distributed import Deadline
from steadygrad.studies.folder import Results, read_run
from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.findings import summarize
from steadygrad.studies.inspect.schema import Histogram, Part, Phase, Settings
from steadygrad.studies.run import start
from tests.unit.studies.framework import Watcher, checked, speed_in_a_moment
from tests.unit.studies.results import RUNTIME, changed, make_header

STUDIES = Path(__file__).parent.parent
HEADER = make_header(
    study="inspect",
    kind=schema.Header,
    settings=Settings(task="tiny_task.py:make_task", steps=80),
    plan=schema.Plan(largest_batch=4, steps=80, work=1004),
    runtime=changed(RUNTIME, dtype="float16"),
)


def spec(factory):
    """How the command line names a factory in ``fp16_task.py``."""
    return f"{STUDIES / 'fp16_task.py'}:{factory}"


def look(folder, task, *, steps=16, at=None, monitor=None, **settings):
    """A study; it is stopped when ``at`` samples of work are done."""
    chosen = {"budget": 600.0, "device": "cpu", "threads": 1, **settings}
    deadline = Deadline()
    monitor = monitor or Watcher(at, lambda: deadline.limit(-1e9))
    with speed_in_a_moment():
        settings = Settings(task=task, steps=steps, workers=1, **chosen)
        return checked(start("inspect", settings, folder, deadline=deadline, monitor=monitor))


def parts_of(folder, phase=None):
    """The recorded parts, of one phase or of all."""
    found = read_run(folder).results.select(Phase)
    return [part for end in found if phase in (None, end.phase) for part in end.parts]


def counts(low, *numbers, zero=0, over=0):
    return Histogram(zero=zero, low=low, counts=numbers, over=over)


def phase(
    name, weights, largest, overflows=None, *, kind="weights", plain=None, settled=8.0, **fields
):
    """The result of a phase of eight equal parts; layers have gradients of one kind only."""
    other = {"weights": "activations", "activations": "weights"}[kind]
    same = {
        "overflows": overflows or {},
        "at_any_scale": {},
        "overflowed_at": dict.fromkeys(overflows or {}, 9.0),
        "scales": {"": 0.0, **dict.fromkeys(weights, 0.0)} | {"": settled},
        kind: weights,
        other: {},
        "largest": {kind: largest, other: {}},
        "plain": {kind: plain or {}, other: {}},
        "skipped": 0,
        **fields,
    }
    parts = tuple(Part(steps=step, **{"loss": 1.0, **same}) for step in range(1, 9))
    return [Phase(phase=name, parts=parts, valid_loss=1.0)]


def with_parts(results, **fields):
    """Results whose parts have other fields."""
    return [replace(x, parts=tuple(replace(part, **fields) for part in x.parts)) for x in results]


def summary_of(results, status="complete"):
    """The summary of some results."""
    return summarize(HEADER, Results(results), status)


LARGEST = {"early": -18.0, "late": 5.0}
UNDERFLOWING = [
    # A scale of 2**8: half of what is in the early layer is zero, a quarter subnormal.
    *phase("before", {"early": counts(-15, 25, 25, zero=50), "late": counts(10, 100)}, LARGEST),
    *phase("search", {"early": counts(-3, 100), "late": counts(9, 100)}, LARGEST),
]
STARVED, FED = (end.parts[0].weights for end in UNDERFLOWING)
