"""The studies, from the command line and from Python: two thin layers over one function."""

import html
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeVar

import torch

from steadygrad._checks import InputError, launched
from steadygrad._studies import module_of
from steadygrad.cli.console import Monitor, emit, note, printable, rendered
from steadygrad.cli.options import options_of
from steadygrad.studies.course import generators_kept
from steadygrad.studies.distributed import Deadline, StudyInterrupted
from steadygrad.studies.folder import dumps
from steadygrad.studies.page import PAGE
from steadygrad.studies.record import OBJECT
from steadygrad.studies.run import Outcome, conduct
from steadygrad.studies.schema import Summary
from steadygrad.tasks import Task

if TYPE_CHECKING:
    from steadygrad.studies.ab.schema import Summary as Change
    from steadygrad.studies.advise.schema import Summary as Advice
    from steadygrad.studies.compare.schema import Summary as Comparison
    from steadygrad.studies.inspect.schema import Summary as Inspection

S = TypeVar("S", bound=Summary)
# Options of a study that are no settings.
NO_SETTINGS = ("out", "resume", "json", "quiet", "debug")


def command(name: str, values: Mapping[str, Any], began: float) -> int:
    """Runs or resumes a study, prints its findings, and gives the exit code.

    The budget counts from ``began``, a reading of ``time.monotonic()``.
    """
    json, quiet = values.get("json", False), values.get("quiet", False)
    try:
        # What the task prints must not mix with --json.
        with redirect_stdout(sys.stderr):
            outcome = _conducted(name, values, Deadline(began), quiet)
    except StudyInterrupted as stopped:
        # Before the record was begun: there is nothing to report.
        return 128 + stopped.reason
    if launched()[0] == 0:
        text = _shown(outcome.summary, outcome.page, sys.stderr if json else sys.stdout)
        text = printable(outcome.summary.answer) if quiet else text
        (note if json else emit)(text)
        if json:
            emit(dumps(outcome.summary, indent=2))
    if outcome.failure:
        raise outcome.failure
    return 128 + outcome.stopped_by if outcome.stopped_by else outcome.summary.exit_code


def _conducted(
    name: str, values: Mapping[str, Any], deadline: Deadline, quiet: bool, task: Task | None = None
) -> Outcome:
    """Runs or resumes a study by the values of its options, with progress unless ``quiet``."""
    given = {key: value for key, value in values.items() if key not in NO_SETTINGS}
    folders = {"out": values.get("out"), "continued": values.get("resume")}
    monitor = Monitor(not quiet and launched()[0] == 0, deadline.left)
    # What is written to standard error meanwhile comes above the bar.
    with monitor.bar:
        return conduct(name, given, task=task, **folders, deadline=deadline, monitor=monitor)


def _shown(summary: Summary, page: Path | None, stream: TextIO | None) -> str:
    """The answer, the table, the remarks, and where the page is."""
    said = summary.to_dict()
    text = rendered(said["answer"], said["table"], *said["remarks"], stream=stream)
    return f"{text}\n\nReport: {printable(str(page))}" if page else text


@dataclass(frozen=True, repr=False)
class StudyResult(Generic[S]):
    """The result of a study: printed, its answer and table; in a notebook, its page.

    Attributes:
        summary: The answer in one sentence (``answer``), the ``table``, the ``remarks``, the
            ``findings`` and all numbers. Its fields are those of ``Summary`` in the study's
            ``schema`` module, such as ``summary.recommendation.batch_size``.
        folder: The run's folder, for ``resume=``; its ``report.html`` is the page.
    """

    summary: S
    folder: Path

    def to_dict(self) -> Mapping[str, Any]:
        """The summary in plain values, as in ``summary.json``."""
        return self.summary.to_dict()

    def __repr__(self) -> str:
        return _shown(self.summary, self.folder / PAGE, None)

    def _repr_html_(self) -> str:
        page = html.escape((self.folder / PAGE).read_text(encoding="utf-8"))
        return f'<iframe sandbox srcdoc="{page}" style="width: 100%; height: 40em"></iframe>'


def advise(
    task: Task | str | None = None, *, budget: float | str | None = None, **options: Any
) -> "StudyResult[Advice]":
    """Which batch size to train at: ``steadygrad advise`` from Python.

    The study, its numbers and its folder are those of the command. A signal ends it as it ends the
    command, and is then delivered as ever; the folder keeps what was measured. Random generators
    and torch's number of threads are afterwards what they were. A process runs one study at a time.

    Args:
        task: A built-in name or ``"path/to/file.py:make_task"``, which workers can load; or a
            :class:`steadygrad.Task`, whose trials run one after another in this process. Default:
            ``"char-lm"``, or the task of the run that is resumed.
        budget: Seconds, or a text such as ``"5m"``. Default: five minutes, or as recorded.
        options: The options of the command, such as ``tolerance=0.1``, ``workers=4``,
            ``out="runs/mine"`` or ``resume="runs/mine"``; ``progress=False`` prints none.

    Returns:
        What was found.

    Raises:
        ValueError: For anything that cannot be used, such as an option that the study does not
            have, or a task whose code raises. Results until then are kept in the folder.
    """
    return _study("advise", [task], budget, **options)


def compare(
    task: Task | str | None = None, *, budget: float | str | None = None, **options: Any
) -> "StudyResult[Comparison]":
    """Whether another optimizer is worth it: ``steadygrad compare``, as :func:`advise`."""
    return _study("compare", [task], budget, **options)


def inspect(
    task: Task | str | None = None, *, budget: float | str | None = None, **options: Any
) -> "StudyResult[Inspection]":
    """The layers that lose float16 gradients: ``steadygrad inspect``, as :func:`advise`."""
    return _study("inspect", [task], budget, **options)


def ab(
    *arms: Task | str | Callable[[int], float], budget: float | str | None = None, **options: Any
) -> "StudyResult[Change]":
    """Whether a change is real: ``steadygrad ab A B``, as :func:`advise`; of functions, too."""
    if all(isinstance(arm, str) for arm in arms):
        return _study("ab", arms, budget, **options)
    trials = module_of("ab", "trials")
    given = [trials.load_arm(arm) if isinstance(arm, str) else arm for arm in arms]
    return _study("ab", [trials.arms_of(given)], budget, **options)


def _study(
    name: str, tasks: Sequence[Any], budget: Any, *, progress: bool = True, **options: Any
) -> StudyResult[Any]:
    values = options_of(name).read(_words(tasks, {"budget": budget, **options}))
    task = next((given for given in tasks if isinstance(given, Task)), None)
    if task:
        values = {"workers": 1, **values, "task": OBJECT}
        if values["workers"] != 1 or values.get("dask") or values.get("executor"):
            raise InputError(
                "Expected a task that workers can load. Found a Task, which only this process has. "
                "Remedy: task='path/to/file.py:make_task', or no workers."
            )
    threads = torch.get_num_threads()
    device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    try:
        # First the generators: Rich draws a number as it is imported.
        with generators_kept(device):
            outcome = _conducted(name, values, Deadline(), not progress, task)
    except StudyInterrupted as stopped:
        signal.raise_signal(stopped.reason)
        raise
    finally:
        torch.set_num_threads(threads)
    if outcome.failure:
        raise outcome.failure
    if outcome.stopped_by:
        signal.raise_signal(outcome.stopped_by)
    return StudyResult(outcome.summary, outcome.folder)


def _words(tasks: Sequence[Any], options: Mapping[str, Any]) -> list[str]:
    """The command line that a call is read as."""
    words = [task for task in tasks if isinstance(task, str)]
    for task in tasks:
        if not isinstance(task, Task | str | None):
            raise InputError(
                f"Expected a Task or the name of one. Found {type(task).__name__}. Remedy: call "
                "the function that makes it, or 'path/to/file.py:make_task'."
            )
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if value is not None and value is not False:  # 0 is a value
            text = ",".join(map(str, value)) if isinstance(value, list | tuple) else value
            words.append(flag if value is True else f"{flag}={text}")
    return words
