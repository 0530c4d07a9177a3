"""A run's folder: ``header.json``, ``results/KEY.json``, ``summary.json`` and ``report.html``.

Each file comes into being beside and is renamed into place, so that a kill at any moment leaves
whole files. A run may come from a stranger: no name in it is trusted to be a file, nor to be small.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np

from steadygrad._checks import InputError
from steadygrad._files import read_file, read_json, replace
from steadygrad._studies import STUDIES, module_of
from steadygrad.studies.schema import SCHEMA, Header, Key, Result, Summary

DEPENDENT = (
    "A sample's loss depends on the other samples of its batch: the batch size is part of what is "
    "trained, and no batch can be cut into micro-batches, as a noise scale needs."
)
HEADER, SUMMARY, RESULTS = "header.json", "summary.json", "results"

R = TypeVar("R", bound=Result)


class RunError(InputError):
    """A run's folder cannot be read or written."""


class Results:
    """Results by key; those of one kind come in one order, whichever was there first."""

    def __init__(self, results: Iterable[Result] = ()) -> None:
        self._by_key = {result.key: result for result in results}

    def __contains__(self, key: Key) -> bool:
        return key in self._by_key

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[Result]:
        return (self._by_key[key] for key in sorted(self._by_key))

    def add(self, result: Result) -> None:
        """Takes a result in."""
        self._by_key[result.key] = result

    def get(self, kind: type[R], *key: Any) -> R | None:
        """The result of a class with these key fields; None if there is none."""
        found = self._by_key.get((str(kind.__struct_config__.tag), *key))
        return found if isinstance(found, kind) else None

    def select(self, kind: type[R]) -> list[R]:
        """All results of one class, in order."""
        return [result for result in self if isinstance(result, kind)]


@dataclass(frozen=True)
class Run:
    """A run's folder as it was read."""

    folder: Path
    header: Any
    results: Results
    # Content of `summary.json`; None where there is none that can be read.
    summary: Mapping[str, Any] | None
    unreadable: tuple[str, ...] = ()  # names of files that hold no result of this run


def create(folder: Path, header: Header) -> None:
    """Begins a run in a folder that is absent or empty, and stays empty if that fails."""
    text = _text(header)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for found in folder.iterdir():
            raise InputError(
                f"Expected an absent or empty folder. Found {str(folder)!r} with {found.name!r} in "
                "it. Remedy: name another folder with --out, or continue a run with --resume."
            )
        # Only one of two processes can make it.
        (folder / RESULTS).mkdir()
    try:
        replace_file(folder / HEADER, text)
    except BaseException:
        (folder / RESULTS).rmdir()
        raise


def identity(folder: Path) -> str:
    """The SHA-256 of a run's header, which no run shares with another; ``OSError`` without one."""
    return hashlib.sha256(read_file(folder / HEADER)).hexdigest()


def write_result(folder: Path, result: Result, run: str) -> None:
    """Writes one result's file; ``run`` is the identity of its run."""
    path = folder / RESULTS / _name(result.key)
    with writing(path):
        path.parent.mkdir(exist_ok=True)
    replace_file(path, _text({**msgspec.to_builtins(result), "run": run}, None))


def summarize(header: Header, results: Results, status: str) -> Summary:
    """The content of ``summary.json``, a pure function of a run and of how it ended."""
    findings = module_of(header.study, "findings")
    with np.errstate(all="ignore"):  # of a damaged run's numbers
        summary: Summary = findings.summarize(header, results, status)
    if header.task.dependent:
        remarks = (*summary.remarks[:2], DEPENDENT)
        summary = msgspec.structs.replace(summary, remarks=remarks)
    return summary


def write_summary(folder: Path, summary: Any) -> None:
    """Replaces ``summary.json``."""
    replace_file(folder / SUMMARY, _text(summary))


def read_header(folder: Path) -> Any:
    """The header of a run."""
    path = folder / HEADER
    try:
        found = read_json(path)
    except OSError as error:
        raise RunError(
            f"Expected the folder of a run, with a {HEADER} in it. Found {str(folder)!r}, "
            f"{error.strerror}. Remedy: pass the folder that --out named."
        ) from error
    except ValueError:
        found = None
    version = found.get("schema") if isinstance(found, dict) else None
    if type(version) is not int:
        raise _wrong(path, "the header of a run", "a damaged or foreign file")
    if version != SCHEMA:
        raise RunError(
            f"{str(path)!r} was written by another steadygrad: schema {version}, this one reads "
            f"{SCHEMA}. Remedy: use the steadygrad that wrote it, or run the study again."
        )
    study = found.get("study")
    if str(study) not in STUDIES:
        raise _wrong(path, "the header of a known study", f"study = {study!r}")
    try:
        return msgspec.convert(found, module_of(study, "schema").Header, strict=False)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise _wrong(path, "a header that makes sense", str(error)) from None


def read_run(folder: Path) -> Run:
    """Reads a run's header, its results, and its summary where there is one.

    A result that cannot be read, or is another run's, is left out: its trial is run again.
    """
    folder = Path(folder)
    header, own = read_header(folder), identity(folder)
    paths = sorted((folder / RESULTS).glob("*.json"))
    found = {path.name: _read_result(path, own, header) for path in paths}
    results = Results(result for result in found.values() if result is not None)
    unreadable = tuple(name for name, result in found.items() if result is None)
    summary = None
    with suppress(OSError, ValueError):
        summary = read_json(folder / SUMMARY)
    fits = isinstance(summary, dict) and summary.get("study") == header.study
    return Run(folder, header, results, summary if fits else None, unreadable)


def refuse_links(folder: Path) -> None:
    """Refuses to go on where a folder in the run's is a link: what is written lands elsewhere."""
    for path in folder.iterdir():
        if path.is_symlink() and path.is_dir():
            raise RunError(
                f"Expected the results of the run in {str(folder)!r}. Found "
                f"{path.name!r}, a link. Remedy: put in its place what it leads to."
            )


def _read_result(path: Path, run: str, header: Header) -> Result | None:
    kinds = module_of(header.study, "schema").RESULTS
    with suppress(OSError, ValueError):
        found = read_json(path)
        result: Result = msgspec.convert(found, kinds, strict=False)
        fits = found.get("run") == run and path.name == _name(result.key)
        # Of a study without arms any result fits.
        if fits and getattr(result, "arm", 0) < len(getattr(header.plan, "arms", [0])):
            return result
    return None


@contextmanager
def understanding(folder: Path) -> Iterator[None]:
    """Turns any error over a run whose files hold the right types into a :class:`RunError`."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"
        raise RunError(
            f"Expected a run that makes sense in {str(folder)!r}. Found numbers or names that "
            f"no study writes ({reason}). Remedy: restore it from a copy, or see --debug."
        ) from error


def replace_file(path: Path, data: bytes) -> None:
    """Writes ``path`` in one step: a reader, also after an error, sees the old file or the new."""
    with writing(path):
        replace(path, data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns a failure to write ``path`` into one line with the reason and the remedy."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"Cannot write to {str(path)!r}: {error.strerror or error}. Remedy: make room there "
            "and --resume a run that is begun, or name another folder with --out."
        ) from error


def _name(key: Key) -> str:
    """The name of a result's file: keys are bounded numbers, and words of the studies' own."""
    # 1 and 1.0 are equal keys.
    parts = (str(p).removesuffix(".0") if isinstance(p, float) else str(p) for p in key)
    return f"{'-'.join(parts)}.json"


def dumps(value: Any, *, indent: int | None = None) -> str:
    """Writes strict JSON, with non-finite floats as the strings ``"nan"``, ``"inf"``, ``"-inf"``.

    ``msgspec.convert(..., strict=False)`` makes floats of them again. Structs become objects.
    """
    return json.dumps(_encode(msgspec.to_builtins(value)), indent=indent, allow_nan=False)


def _encode(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_encode(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _text(value: Any, indent: int | None = 2) -> bytes:
    return f"{dumps(value, indent=indent)}\n".encode()


def _wrong(path: Path, expected: str, found: str) -> RunError:
    found = " ".join(found.split())[:100]
    return RunError(
        f"Expected {expected} in {str(path)!r}. Found {found}. "
        "Remedy: restore the file from a copy, or start a new run."
    )
