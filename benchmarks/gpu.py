"""What a machine with one CUDA device shows in eight minutes, in one dated table.

Such a machine may be had rarely, for ten minutes, and be taken away at any second. So what is worth
most comes first, each part has a process and a limit of its own, and the table is written anew
while parts go on, beside and renamed. A part that crashes, hangs or does not fit takes no other
along, and the table names it. Parts that measure are in gpu_parts.py. Nothing needs the network, or
an installation: the Python that runs it needs torch, Triton, pytest, pytest-xdist, and what the
studies need.

Run: python benchmarks/gpu.py    (make gpu)
     python benchmarks/gpu.py --rehearsal    (make gpu-rehearsal): on a CPU, by Triton's
     interpreter, tiny, with a table in a temporary folder
"""

import argparse
import datetime
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
MEASURE = [sys.executable, str(Path(__file__).with_name("gpu_parts.py"))]
# Seconds for everything.
DEADLINE = 480.0
# A rehearsal is as short on any machine.
STUDIES = {
    "cuda": {"inspect": "--budget 20s", "advise": "digits-autoencoder --budget 20s"},
    "cpu": {
        "inspect": "digits-classifier --steps 16 --workers 1 --threads 1",
        "advise": "digits-classifier --samples 512 --seeds 4 --workers 1 --threads 1",
    },
}
# Lines of a part's output that the table keeps of a study, and of what failed.
LAST = 40
SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGHUP


class Part(NamedTuple):
    """Something to find out, in a process of its own."""

    name: str
    command: list[str]
    limit: float  # seconds it may take; it is left out where less than half of them is left
    read: Callable[[list[str]], tuple[str, list[str]]]  # from its output a note, and Markdown


class Stopped(Exception):
    """A signal to end came."""


def tables(output: list[str]) -> tuple[str, list[str]]:
    """The rows of tables, and remarks, of a part that measures."""
    found: list[str] = []
    for line in output:
        if line.startswith(("| ", "|--", "- ")) or (not line and found):
            # A table begins after an empty line, and ends before one.
            found += [""] * bool(line and found and found[-1][:1] not in (line[0], "")) + [line]
    return "", found


def text(output: list[str]) -> tuple[str, list[str]]:
    """The end of what a program printed, as it is."""
    return "", ["```text", *output[-LAST:], "```"] if output else []


def tests(output: list[str]) -> tuple[str, list[str]]:
    """How many tests passed, failed and were skipped so far, and those that failed or hang."""
    kinds = "PASSED|FAILED|ERROR|SKIPPED|XFAIL|XPASS"
    # A name alone says that the test has begun; what processes print may follow in the same line.
    name = r"(\S+\.py::[^\s\[]+(?:\[.*?\](?=\s|$))?)(?: - (.*))?"
    line = re.compile(rf"(?:\[gw\d+\] \[ *\d+%\] )?(?:({kinds}) )?{name}")
    ends: dict[str, str] = {}
    for found in filter(None, map(line.match, output)):
        kind, name, why = found.groups()
        # The summary comes last, and says why. What failed stays so, also if its process ended.
        before, end = ends.get(name, "BEGUN"), kind or "BEGUN"
        if before in ("BEGUN", "PASSED") or (why and ":" not in before):
            ends[name] = f"{end}: {why}" if why else end
    counts = Counter(end.partition(":")[0].lower() for end in ends.values())
    wrong = [f"- `{n}` {end}" for n, end in ends.items() if end[0] in "BFE" or end == "XPASS"]
    return ", ".join(f"{counts[k]} {k}" for k in sorted(counts)) or "no test ended", wrong


def measured(device: str, limit: float, *words: str) -> Part:
    return Part(" ".join(words), [*MEASURE, device, *words], limit, tables)


def tested(name: str, limit: float, *which: str) -> Part:
    # All processes share one device.
    several = ["--numprocesses", str(min(4, os.cpu_count() or 1)), "--dist", "worksteal"]
    shown = ["-v", "--tb", "short", "-p", "no:cacheprovider", "-o", "faulthandler_timeout=60"]
    command = [sys.executable, "-m", "pytest", *several, *shown, *which]
    return Part(f"tests {name}", command, limit, tests)


def studied(device: str, folder: str, command: str) -> Part:
    given = [*STUDIES[device][command].split(), "--device", device, "--out", f"{folder}/{command}"]
    return Part(command, [sys.executable, "-m", "steadygrad", command, *given], 45, text)


def parts_on(device: str, folder: str) -> list[Part]:
    """All parts, those that are worth most first."""
    rounds = "10" if device == "cuda" else "2"
    watch = [sys.executable, str(ROOT / "benchmarks/watch_overhead.py"), "--device", device]
    numbers = "tests/gpu/test_numbers.py"
    return [
        measured(device, 75, "step", "124M", "float32"),
        measured(device, 75, "ways"),
        tested("of numbers", 150, numbers, "-m", "not slow"),
        measured(device, 60, "step", "124M", "8bit"),
        measured(device, 60, "step", "124M", "bfloat16"),
        measured(device, 45, "step", "1000", "float32"),
        measured(device, 60, "graph", "124M"),
        Part("doctor", [sys.executable, "-m", "steadygrad", "doctor"], 30, text),
        tested("of the rest", 60, "tests/gpu", "--ignore", numbers, "-m", "not slow"),
        studied(device, folder, "inspect"),
        measured(device, 45, "step", "1000", "8bit"),
        measured(device, 45, "compile"),
        measured(device, 30, "step", "23M", "float32"),
        Part("watch overhead", [*watch, "--rounds", rounds], 40, tables),
        studied(device, folder, "advise"),
        measured(device, 30, "step", "1000", "bfloat16"),
        measured(device, 30, "step", "23M", "8bit"),
        measured(device, 30, "step", "23M", "bfloat16"),
        tested("that are slow", 60, "tests/gpu", "-m", "slow"),
    ]


class Table:
    """The file with all that is known so far, and what is missing; its name is nobody else's."""

    def __init__(self, folder: Path, head: str, parts: Sequence[Part]) -> None:
        self.date, self.head = datetime.date.today().isoformat(), head
        # How a part ended, how long it took, and what it left.
        self.rows = {part.name: ("**missing**: not begun", 0.0, [""]) for part in parts}
        folder.mkdir(parents=True, exist_ok=True)
        for again in ("", *(f"-{i}" for i in range(2, 1000))):
            self.path = folder / f"{self.date}-gpu{again}.md"
            with suppress(FileExistsError):
                self.path.touch(exist_ok=False)
                break
        self.write()

    def put(self, part: Part, how: str, began: float | None, output: list[str]) -> None:
        """Takes what is known of a part that began at a reading of the clock, if it has."""
        note, found = part.read(output)
        if how.startswith(("**failed", "**cut off")):
            found = [*found, "", *text([line for line in output if line not in found])[1]]
        seconds = 0.0 if began is None else time.monotonic() - began
        self.rows[part.name] = (f"{how}, {note}" if note else how, seconds, found)
        self.write()

    def write(self) -> None:
        """Writes the file beside, and puts it in its place."""
        lines = [f"# On a GPU, {self.date}", "", self.head, "", "| part | outcome | seconds |"]
        lines += ["|---|---|---|"]
        lines += [f"| {name} | {how} | {s:.0f} |" for name, (how, s, _) in self.rows.items()]
        for name, (_, _, found) in self.rows.items():
            lines += ["", f"## {name}", "", *found] if any(found) else []
        number, name = tempfile.mkstemp(".part", self.path.stem, self.path.parent)
        try:
            with open(number, "w") as file:
                file.write("\n".join(lines) + "\n")
            Path(name).chmod(0o644)
            Path(name).replace(self.path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise


def end_of(part: Part, limit: float, lines: list[str], seen: Callable[[], object]) -> str:
    """How a part ended within a limit; its lines are added one by one, and seen every second."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    # Columns, so that pytest's summary says why.
    own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1", "COLUMNS": "300"}
    arrived: SimpleQueue[str | None] = SimpleQueue()
    process = subprocess.Popen(
        part.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, **own},
        cwd=ROOT,
        start_new_session=True,
    )
    # What hangs in a driver may survive a kill: nothing waits for its pipe.
    threading.Thread(target=pump, args=(process.stdout, arrived), daemon=True).start()
    end, shown = time.monotonic() + limit, 0.0
    try:
        while (left := end - time.monotonic()) > 0:
            with suppress(Empty, OSError, subprocess.TimeoutExpired):
                if (line := arrived.get(timeout=min(left, 1.0))) is None:
                    return ended(process.wait(timeout=left))
                lines.append(line)
                print(line, flush=True)
            if time.monotonic() > shown + 1.0:
                seen()
                shown = time.monotonic()
        return f"**cut off** after {limit:.0f} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=5)


def pump(pipe, arrived) -> None:
    """Hands lines on, and None at their end."""
    with pipe:
        for line in pipe:
            arrived.put(line.rstrip())
    arrived.put(None)


def ended(code: int) -> str:
    """How a process ended, by its exit code."""
    if code < 0:
        return f"**failed**: ended by {signal.Signals(-code).name}"
    return f"**failed**: exit code {code}" if code else "done"


def run(parts: Sequence[Part], table: Table, deadline: float = DEADLINE) -> bool:
    """Runs all parts that fit; whether all are done. A signal ends it with what there is."""
    end = time.monotonic() + deadline
    try:
        for part in parts:
            began, lines = time.monotonic(), []
            if (left := end - began) < part.limit / 2:
                why = f"{max(0.0, left):.0f} s were left, it may take {part.limit:.0f}"
                table.put(part, f"**left out**: {why}", None, lines)
                continue
            seen = partial(table.put, part, "**missing**: it is not over", began, lines)
            print(f"\n{part.name}: {' '.join(part.command)}", flush=True)
            seen()
            how = end_of(part, min(left, part.limit), lines, seen)
            table.put(part, how, began, lines)
    except Stopped as signalled:
        table.put(part, f"**interrupted** by {signalled}", began, lines)
    return all(how.startswith("done") for how, _, _ in table.rows.values())


def stop(number: int, _: object) -> None:
    """Ends the run, once."""
    for one in SIGNALS:
        signal.signal(one, signal.SIG_IGN)
    raise Stopped(signal.Signals(number).name)


def commit() -> str:
    """The commit, and whether files differ from it."""
    asked = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(asked, cwd=ROOT, text=True, timeout=10).strip()
    return "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rehearsal", nargs="?", const="", metavar="FOLDER", help="on a CPU, tiny")
    given = parser.parse_args().rehearsal
    device, began = ("cuda" if given is None else "cpu"), time.monotonic()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # Where studies remember runs.
        os.environ["XDG_STATE_HOME"] = folder
        lines: list[str] = []
        how = end_of(measured(device, 90, "machine"), 90, lines, lambda: None)
        if how != "done":
            print(f"Nothing was measured: it needs torch and a CUDA device ({how}).")
            return 1
        head = f"{lines[-1]}. Commit {commit()}, `make gpu{'' if given is None else '-rehearsal'}`."
        # A rehearsal's numbers mean nothing, and do not lie among results.
        to = ROOT / "benchmarks/results" if given is None else Path(given or tempfile.mkdtemp())
        parts, deadline = parts_on(device, folder), DEADLINE - (time.monotonic() - began)
        if device == "cpu":
            # Of the sets one, which is as tiny as the others; the machine may be any.
            parts = [one for one in parts if one.name.split()[1:2] not in (["23M"], ["1000"])]
            parts, deadline = [one._replace(limit=5 * one.limit) for one in parts], math.inf
        table = Table(to, head, parts)
        for one in SIGNALS:
            signal.signal(one, stop)
        is_whole = run(parts, table, deadline)
        print(f"\n{table.path.read_text()}\n{table.path}")
    return 0 if is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
