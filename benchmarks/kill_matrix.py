"""Which faults no test notices: drawn mutants of all rooms, and mended faults put back.

A table has the faults as patches, and which of them were killed before. Each fault meets a test
that killed it before, then tests that cover its lines, as many as a time allows, and at last all
tests of its room, slow ones too; the first that fails ends it.

Run: python benchmarks/kill_matrix.py --cover benchmarks/results/DATE-kill-matrix.json [--save]
     python benchmarks/kill_matrix.py --cover --draw runs/drawn.json
`--draw` makes the table of new mutants first. A run that was cut short goes on where it was.
"""

import argparse
import datetime
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from kill_mutants import SOURCE, draw, git, place_of, planted
from side_by_side import save

ROOT = Path(__file__).resolve().parents[1]
SEED, DRAWN = 20, 420
# For each fault a test that kills it, or why none does.
ANSWERS = Path(__file__).with_name("kill_answers.json")
# Tests and files that a fault meets at most, and seconds to collect a file. So many tests say as
# surely as more that a file is about a line.
MOST, FILES, FILE_COST, ENOUGH = 300, 8, 0.5, 20
# What many tests load. It is loaded once, and tests run in forks.
HEAVY = (
    *("torch", "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.checkpoint"),
    *("scipy.stats", "numba", "matplotlib.figure", "sklearn.datasets"),
    *("rich.console", "msgspec"),
)
# Tests of a room, where no test has been seen on a line: compiled code, other processes.
ROOMS = {
    "optim/loops": ("unit/optim/test_loop", "unit/optim/test_fused", "property/"),
    "optim/kernels": ("unit/optim/test_kernels",),
    "studies": ("unit/studies/test_", "unit/cli/test_", "unit/studies/"),
    "optim": ("unit/optim/", "golden/test_optim", "contracts/", "property/"),
    "top level": ("unit/test_", "distributed/test_"),
    "integrations": ("integrations/",),
}
# Numba's cache knows a compiled loop by its own file, not by those that it calls.
COMPILED = ("optim/loops/", "optim/codes.py", "optim/passes.py", "_rule.py")


def copy_of(work, number):
    """A clone that faults are planted in; as committed, also if a run was cut short."""
    copy = work / f"copy{number}"
    if not copy.exists():
        git(ROOT, "clone", "--quiet", str(ROOT), str(copy))
    git(copy, "checkout", "--quiet", "--", ".")
    (work / "plugin").mkdir(exist_ok=True)
    shutil.copy(Path(__file__).with_name("kill_plugin.py"), work / "plugin")
    return copy


def environment(work, copy, **more):
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    path = [str(copy / "src"), str(work / "plugin"), *filter(None, before)]
    one = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    more = {name: str(value) for name, value in more.items()}
    return os.environ | one | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(path))} | more


def cover(work, workers):
    """Runs the fast tests once, and keeps how each ended and which lines it ran."""
    for folder in [work / "lines", *work.glob("copy*")]:
        shutil.rmtree(folder, ignore_errors=True)
    (work / "lines").mkdir(parents=True)
    (work / "cover.jsonl").unlink(missing_ok=True)
    copy = copy_of(work, 0)
    where = environment(work, copy, KILL_LINES=work / "lines", KILL_REPORT=work / "cover.jsonl")
    command = ["-p", "kill_plugin", "-p", "no:cacheprovider", "-q", "--tb=short", "-m", "not slow"]
    command += ["-n", str(workers), "--dist", "worksteal"]
    subprocess.run([sys.executable, "-m", "pytest", *command], cwd=copy, env=where, check=False)
    read_lines(work)


def read_lines(work):
    """Tests by line, as places in a list of sets of tests: many lines have the same."""
    import coverage

    numbers, sets, files = {}, {}, defaultdict(dict)
    for part in sorted((work / "lines").glob("lines.*")):
        data = coverage.CoverageData(str(part))
        data.read()
        for file in data.measured_files():
            own = files[file[file.rindex(str(SOURCE)) :]]
            for line, tests in data.contexts_by_lineno(file).items():
                known = {numbers.setdefault(test, len(numbers)) for test in tests if test}
                own[line] = own.get(line, set()) | known
    lines = {
        file: {n: sets.setdefault(tuple(sorted(s)), len(sets)) for n, s in own.items()}
        for file, own in files.items()
    }
    found = {"tests": [*numbers], "sets": [*sets], "lines": lines}
    (work / "lines.part").write_text(json.dumps(found))
    (work / "lines.part").replace(work / "lines.json")


class Suite:
    """The fast tests: seconds, and the lines that each covers."""

    def __init__(self, work):
        found = json.loads((work / "lines.json").read_text())
        self._tests, self._sets, self._lines = found["tests"], found["sets"], found["lines"]
        self.cost, self.failed, passed = Counter(), set(), set()
        for test, phase, outcome, seconds in rows_of(work / "cover.jsonl"):
            self.cost[test] += seconds
            if outcome == "failed":
                self.failed.add(test)
            if (phase, outcome) == ("call", "passed"):
                passed.add(test)
        self.usable = passed - self.failed
        self.sizes = Counter(test.partition("::")[0] for test in self.usable)

    def covering(self, root, edits):
        """Tests that run an edit's lines."""
        found = set()
        for edit in edits:
            own = self._lines.get(edit["file"], {})
            at = place_of((root / edit["file"]).read_text().splitlines(), edit)
            for line in range(at + 1, at + 1 + len(edit["before"])):
                numbers = self._sets[own[str(line)]] if str(line) in own else ()
                found |= {self._tests[number] for number in numbers}
        return found & self.usable

    def near(self, mutant):
        """Tests of a mutant's file, if lines of functions were seen, and of its room."""
        files = {edit["file"] for edit in mutant["edits"]}
        places = {place for file in files for place in self._lines.get(file, {}).values()}
        numbers = {number for place in places for number in self._sets[place]}
        found = {self._tests[number] for number in numbers} & self.usable
        return found | {test for test in self.usable if test.startswith(homes(mutant["room"]))}

    def spread(self, tests, seconds, room):
        """Tests of some files in turns, for some seconds.

        The room's own files come first, and those that are most about these lines; in a file
        the shortest case of every function, then the second ones: the shortest of all are alike.
        """
        files, cases, chosen, spent = defaultdict(list), defaultdict(list), [], 0.0
        for test in sorted(tests, key=lambda test: (self.cost[test], test)):
            cases[test.partition("[")[0]].append(test)
        for test in sorted(
            tests, key=lambda t: (cases[t.partition("[")[0]].index(t), self.cost[t])
        ):
            files[test.partition("::")[0]].append(test)

        def about(file):
            return len(files[file]) / self.sizes[file] * min(len(files[file]), ENOUGH)

        near = sorted(files, key=lambda file: (not file.startswith(homes(room)), -about(file)))
        turns = [(file, files[file]) for file in near[:FILES]]
        opening = FILE_COST  # in the first turn
        while turns and len(chosen) < MOST:
            left = []
            for file, queue in turns:
                cost = self.cost[queue[0]] + opening
                if spent + cost <= seconds:
                    chosen.append(queue[0])
                    spent += cost
                left.append((file, queue[1:]))
            turns, opening = [(file, queue) for file, queue in left if queue], 0.0
        return chosen or sorted(tests, key=lambda test: self.cost[test])[:1]

    def tests_of(self, root, mutant, seconds):
        """What is run against a mutant."""
        room, tests = mutant["room"], self.covering(root, mutant["edits"])
        files = tuple(mutant.get("tests", ()))
        if not tests:  # mostly what only other processes run
            files += ("tests/distributed/",)
        if not tests or room in ("optim/loops", "optim/kernels"):
            tests |= self.near(mutant)
        known = {test for test in self.usable if files and test.startswith(files)}
        first = self.spread(known & tests or known, seconds / 2, room) if known else []
        spent = sum(self.cost[test] for test in first)
        return [*first, *self.spread(tests - set(first), seconds - spent, room)]


def homes(room):
    folders = ROOMS.get(room) or (f"unit/{room}/", f"unit/{room.partition('/')[0]}/test_")
    return tuple(f"tests/{folder}" for folder in folders)


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run_tests(copy, tests, limit):
    """Runs tests in a fork until one fails: it, all that ran, and how it ended."""
    report, listed = copy.with_suffix(".report"), copy.with_suffix(".tests")
    report.write_text("")
    listed.write_text("\n".join(tests))
    os.environ.update(KILL_REPORT=str(report), KILL_TESTS=str(listed))
    end, child = time.monotonic() + limit, os.fork()
    if child == 0:
        os._exit(in_fork(copy, sorted({t.partition("::")[0] for t in tests})))
    while not (ended := os.waitpid(child, os.WNOHANG))[0] and time.monotonic() < end:
        time.sleep(0.05)
    with suppress(ProcessLookupError):  # with what tests have left behind
        os.killpg(child, signal.SIGKILL)
    status = ended[1] if ended[0] else os.waitpid(child, 0)[1]
    rows = rows_of(report)
    began = [row[0] for row in rows if row[1] == "start"]
    done = {row[0] for row in rows if row[1] == "teardown"}
    failed = {row[0] for row in rows if row[2] == "failed"}
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1, 5):
        failed |= {test for test in began if test not in done}
    by = "test" if failed else ""
    if code < 0:
        by = "crash" if ended[0] else "time limit"
    elif not began and code != 5:
        by = "import"
    return sorted(failed), began, by


def in_fork(copy, arguments):
    """Pytest as by `python -m pytest`, for the tests' own child processes too."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = os.open(copy.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for place, file in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
        os.dup2(file, place)
    sys.argv, sys.modules["__main__"] = ["pytest"], import_module("pytest.__main__")
    always = ["-p", "kill_plugin", "-p", "no:cacheprovider", "-qx", "--tb=no", "--no-header"]
    try:
        code = int(import_module("pytest").main([*always, *arguments]))
    except BaseException:
        traceback.print_exc()
        code = 99
    sys.stdout.flush()
    sys.stderr.flush()
    return code


def is_compiled(mutant):
    return any(part in edit["file"] for edit in mutant["edits"] for part in COMPILED)


def attempt(copy, mutant, tests, limit):
    """Plants a mutant, runs tests for some seconds, and restores the files with their times."""
    texts, began = planted(copy, mutant), time.monotonic()
    if texts is None or not tests:
        return {"id": mutant["id"], "by": "gone" if texts is None else "untested", "killers": []}
    before = {file: ((copy / file).read_bytes(), (copy / file).stat()) for file in texts}
    folder = tempfile.mkdtemp() if is_compiled(mutant) else ""
    if folder:
        os.environ["NUMBA_CACHE_DIR"] = import_module("numba").config.CACHE_DIR = folder
    try:
        for file, text in texts.items():
            (copy / file).write_text(text)
        killers, ran, by = run_tests(copy, tests, limit + (380 if folder else 0))
    finally:
        # The same times as before: what was compiled of the file holds again.
        for file, (data, stat) in before.items():
            (copy / file).write_bytes(data)
            os.utime(copy / file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        if folder:
            shutil.rmtree(folder)
            import_module("numba").config.CACHE_DIR = os.environ.pop("NUMBA_CACHE_DIR") and ""
    spent = round(time.monotonic() - began, 1)
    return {"id": mutant["id"], "by": by, "killers": killers, "ran": ran, "seconds": spent}


def work_off(work, number, workers, seconds):
    """One worker's share of the mutants that have no line yet."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TRITON_INTERPRET", "1")
    sys.path.remove(str(ROOT / "benchmarks"))
    copy, suite, out = copy_of(work, number), Suite(work), work / "tried.jsonl"
    os.chdir(copy)
    for name in HEAVY:
        with suppress(ImportError):
            import_module(name)
    done = {row["id"] for row in rows_of(out)}
    mutants = json.loads((work / "todo.json").read_text())
    for mutant in [one for one in mutants[number::workers] if one["id"] not in done]:
        tests = []
        if planted(copy, mutant) is not None:
            # Loops are compiled anew, which takes longer than the tests.
            tests = suite.tests_of(copy, mutant, seconds / (4 if is_compiled(mutant) else 1))
        known = [t for t in mutant["killers"] if (copy / t.partition("::")[0]).exists()]
        tests = [*dict.fromkeys([*known[:ENOUGH], *tests])]
        row = attempt(copy, mutant, tests, 5 * seconds + 120)
        if row["by"] in ("", "untested"):
            # All tests of its room, also those for which there was no time, and slow ones.
            files = [f for h in homes(mutant["room"]) for f in sorted(copy.glob(h + "*"))]
            whole = [str(f.relative_to(copy)) for f in files if f.name.startswith("test_")]
            row = attempt(copy, mutant, whole, 6 * seconds)
            if row["by"] == "time limit":  # they may take as long without a fault
                row |= {"by": "", "killers": []}
        slow = [test for test in row["killers"] if "::" in test and test not in suite.usable]
        if slow and run_tests(copy, slow, 30 * seconds)[2]:
            row |= {"by": "", "killers": []}  # they fail without a fault, too
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(number, row["id"], row["by"], row["killers"][:1], row.get("seconds"), flush=True)


def start(work, workers, seconds):
    """Runs the workers, each with a copy of its own."""
    given = ["--work", str(work), "--workers", str(workers), "--seconds", str(seconds)]
    processes = []
    for number in range(workers):
        command = [sys.executable, str(Path(__file__).resolve()), ".", "--worker", str(number)]
        where = environment(work, copy_of(work, number))
        processes.append(subprocess.Popen([*command, *given], env=where))
    for process in processes:
        process.wait()


def draw_all(work, file):
    """Makes a table of mutants, mixed: a part of them stands for all."""
    mutants = draw(copy_of(work, 0), SEED, DRAWN)
    random.Random(SEED).shuffle(mutants)
    untried = [mutant | {"by": "", "killers": []} for mutant in mutants]
    file.write_text(json.dumps({"tests": [], "mutants": untried}) + "\n")


def is_killed(mutant):
    return mutant["by"] in ("test", "crash", "import", "time limit")


def table(head, rows):
    lines = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


FATES = ("room", "faults", "killed before", "killed now", "no longer killed", "code is gone")


def fates(name, mutants):
    there = [mutant for mutant in mutants if mutant["by"] != "gone"]
    lost = sum(mutant["was_killed"] and not is_killed(mutant) for mutant in there)
    before = sum(mutant["was_killed"] for mutant in mutants)
    now = sum(map(is_killed, there))
    return name, len(mutants), before, now, lost, len(mutants) - len(there)


def row_of(mutant):
    """Which fault it is, and where."""
    edit = mutant["edits"][0]
    before, after = (" ⏎ ".join(x.strip() for x in edit[way]) for way in ("before", "after"))
    change = f"`{before[:110]}` -> `{after[:110]}`"
    if len(mutant["edits"]) > 1:
        change += f" and {len(mutant['edits']) - 1} more"
    change = f"{mutant.get('title', '')[:110]} {change}".strip().replace("|", "\\|")
    place = f"{edit['file'].removeprefix('src/steadygrad/')}:{edit['line']}"
    return [mutant["id"], place, change]


def commit_of(work):
    return git(copy_of(work, 0), "rev-parse", "--short", "HEAD").strip()


def compare(work, file, workers, seconds):
    """Tries a table's faults: a text of what is killed now, and for each its killer or a reason."""
    known, answers = json.loads(file.read_text()), {}
    if known["tests"]:  # those of a new draw have other faults' names
        answers = json.loads(ANSWERS.read_text())
    for mutant in known["mutants"]:
        mutant["was_killed"] = is_killed(mutant)
        mutant["killers"] = [known["tests"][number] for number in mutant["killers"]]
        if answers.get(mutant["id"], "").startswith("tests/"):
            mutant["killers"].insert(0, answers.pop(mutant["id"]))
    # What is known to survive for a reason is not tried again.
    todo = [m for m in known["mutants"] if m["was_killed"] or m["id"] not in answers]
    (work / "todo.json").write_text(json.dumps(todo))
    start(work, workers, seconds)
    rows = {row["id"]: row for row in rows_of(work / "tried.jsonl")}
    unknown = {"by": "", "killers": []}
    tried = [mutant | rows.get(mutant["id"], unknown) for mutant in known["mutants"]]
    for mutant in tried:
        by, name = mutant["by"], mutant["id"]
        found = mutant["killers"][0] if mutant["killers"] else by
        answers[name] = found if is_killed(mutant) or by == "gone" else answers.get(name, "")
    rooms = defaultdict(list)
    for mutant in tried:
        rooms[mutant["room"]].append(mutant)
    left = [m for m in tried if not is_killed(m) and m["by"] != "gone"]
    listed = [[*row_of(m), answers[m["id"]]] for m in sorted(left, key=lambda m: m["id"])]
    text = f"""# Kill matrix, once more

{len(tried)} faults of `{file.name}`, tests of commit {commit_of(work)}.
For each fault {seconds:g} seconds of tests; where none of these failed, all tests of its room.

{table(FATES, [*(fates(*room) for room in sorted(rooms.items())), fates("all", tried)])}

## Survivors

{table(["fault", "place", "change", "reason"], listed)}
"""
    return text, answers


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("table", type=Path, help="faults, and which were killed before")
    for name, text in (
        ("--cover", "see first which lines each test runs"),
        ("--draw", "make the table first, of new mutants"),
        ("--save", "keep text and answers"),
    ):
        parser.add_argument(name, action="store_true", help=text)
    parser.add_argument("--seconds", type=float, default=20.0, help="of tests for each fault")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "kill-matrix")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.draw and options.save:
        parser.error("--save is for a table whose faults were tried before")
    options.work = options.work.resolve()
    options.work.mkdir(parents=True, exist_ok=True)
    given = options.workers, options.seconds
    if options.worker is not None:
        work_off(options.work, options.worker, *given)
        sys.exit()
    if options.cover:
        cover(options.work, options.workers)
    if options.draw:
        draw_all(options.work, options.table)
    text, answers = compare(options.work, options.table, *given)
    print(text)
    if options.save:
        save("kill-matrix-after", text, datetime.date.today().isoformat())
        ANSWERS.write_text(json.dumps(answers, indent=1, sort_keys=True) + "\n")
