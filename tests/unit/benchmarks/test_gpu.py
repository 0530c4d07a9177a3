"""`make gpu` keeps what it has measured, whatever happens: on a CPU, with parts of all kinds."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
# Parts that are done, crash, hang with a process of their own, and have tests that fail.
PARTS = """
import signal, sys
from pathlib import Path
import gpu

def part(name, code, limit=60):
    return gpu.Part(name, [sys.executable, "-c", "import os, time; " + code], limit, gpu.tables)

hang = "print('| half |'); os.fork(); own = os.getppid()"
hang += "\\nwhile os.getppid() == own: time.sleep(0.1)"
parts = {
    "done": part("done", "print('| one |\\\\n|---|\\\\nnoise')"),
    "crash": part("crash", "print('| two |'); os.abort()"),
    "hang": part("hang", hang, float(sys.argv[3])),
    "tests": gpu.tested("of all", 60, sys.argv[4]),
    "long": part("long", "", 1000),
    "last": part("last", "print('- three')"),
}
for one in gpu.SIGNALS:
    signal.signal(one, gpu.stop)
chosen = [parts[name] for name in sys.argv[2].split()]
sys.exit(not gpu.run(chosen, gpu.Table(Path(sys.argv[1]), "A machine.", chosen), 200))
"""
TESTS = """
import os, pytest
def test_right(): pass
def test_wrong(): assert 1 == 2
def test_crash(): os.abort()
@pytest.mark.skip
def test_left(): pass
"""


@pytest.fixture
def begin(tmp_path):
    """Starts some of the parts, with a limit for the one that hangs."""
    script, tests = tmp_path / "parts.py", tmp_path / "test_some.py"
    script.write_text(PARTS)
    tests.write_text(TESTS)
    own = {**os.environ, "PYTHONPATH": str(SCRIPTS)}

    def started(names, limit):
        command = [sys.executable, script, tmp_path / "found", names, str(limit), tests]
        return subprocess.Popen(command, env=own, stdout=subprocess.DEVNULL)

    return started


def outcomes(folder):
    """How each part ended, and all lines, of the one table in a folder."""
    text = "".join(path.read_text() for path in folder.glob("*.md"))
    return dict(re.findall(r"^\| (.+) \| (.+) \| \d+ \|$", text, re.M)), text.splitlines()


def test_no_part_takes_another_along(begin, tmp_path):
    assert begin("done crash hang tests long last", 4).wait() == 1
    rows, lines = outcomes(tmp_path / "found")
    assert rows.pop("long").startswith("**left out**")
    assert rows == {
        "done": "done",
        "crash": "**failed**: ended by SIGABRT",
        "hang": "**cut off** after 4 s",
        "tests of all": "**failed**: exit code 1, 2 failed, 1 passed, 1 skipped",
        "last": "done",
    }
    assert {"A machine.", "| one |", "| two |", "| half |", "- three"} < {*lines}
    assert "noise" not in lines
    wrong = sorted(line for line in lines if line.startswith("- `"))
    assert ["test_crash" in wrong[0], "test_wrong" in wrong[1]] == [True, True]
    assert "assert 1 == 2" in wrong[1]


@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_an_interruption_leaves_what_was_measured(begin, tmp_path, number):
    process = begin("done hang last", 60)
    while "| half |" not in outcomes(tmp_path / "found")[1]:
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.Signals[number])
    assert process.wait() != 0
    rows, lines = outcomes(tmp_path / "found")
    killed = "**missing**: it is not over"
    assert rows == {
        "done": "done",
        "hang": killed if number == "SIGKILL" else f"**interrupted** by {number}",
        "last": "**missing**: not begun",
    }
    assert {"| one |", "| half |"} < {*lines}


@pytest.mark.slow
def test_the_rehearsal_runs_through(tmp_path):
    command = [sys.executable, SCRIPTS / "gpu.py", "--rehearsal", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True)
    rows, lines = outcomes(tmp_path)
    assert {how.partition(",")[0] for how in rows.values()} == {"done"}, done.stdout[-3000:]
    assert len(rows) == 13
    for rule in ("LANS", "LAMB", "ScaledAdam"):
        for kind in ("float32", "bfloat16", "8bit"):
            line = next(line for line in lines if line.startswith(f"| {rule}, {kind} |"))
            _, _, by, apart, _ = line.split(" | ")
            assert "kernels" in by
            assert float(apart) < 1e-5  # of the weights by multi-tensor calls
        timed = [line for line in lines if line.startswith(f"| {rule}(fused=True) | ")]
        assert [("kernels" in row, ": red" in row) for row in timed] == 3 * [(True, True)]
        (graph,) = (line for line in lines if line.startswith(f"| {rule}(fused=True), float32 |"))
        assert int(graph.split(" | ")[1]) > 0  # calls of operators
