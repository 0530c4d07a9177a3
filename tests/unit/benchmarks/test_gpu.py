"""`make gpu` keeps what it has measured, whatever happens: its rehearsal, on a CPU."""

import os
import re
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from signal import Signals

import pytest

SCRIPTS = Path(__file__).parents[3] / "benchmarks"
HANG = "print('| half |'); os.fork(); time.sleep(60)"
TESTS = "import os\ndef test_a(): pass\ndef test_b(): assert 1 == 2\ndef test_c(): os.abort()\n"


def outcomes(folder):
    """How each part ended, and all lines, of the table in a folder."""
    text = "".join(path.read_text() for path in folder.glob("*.md"))
    return dict(re.findall(r"^\| (.*) \| (.+) \| \d+ \|$", text, re.M)), text.splitlines()


def test_no_part_takes_another_along(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(SCRIPTS)
    gpu, file = import_module("gpu"), tmp_path / "test_some.py"
    file.write_text(TESTS)
    codes = {"crash": "print('| two |\\nnoise'); os.abort()", "hang": HANG, "last": "print('- 3')"}
    crash, hang, last = (
        gpu.Part(name, [sys.executable, "-c", "import os, time; " + code], 8, gpu.tables)
        for name, code in codes.items()
    )
    parts = crash, hang, gpu.tested("", 60, str(file)), last._replace(name="", limit=999), last
    assert not gpu.run(parts, gpu.Table(tmp_path, "A machine.", parts), 200)
    rows, lines = outcomes(tmp_path)
    assert rows.pop("").startswith("**left out**")
    assert list(rows.values()) == [
        "**failed**: ended by SIGABRT",
        "**cut off** after 8 s",
        "**failed**: exit code 1, 2 failed, 1 passed",
        "done",
    ]
    assert {"A machine.", "| two |", "| half |", "- 3"} < {*lines}
    fault, crash = sorted(line for line in lines if line.startswith("- `"))
    assert "assert 1 == 2" in fault
    assert "crashed" in crash


@pytest.mark.slow
@pytest.mark.parametrize("number", ["SIGTERM", "SIGINT", "SIGKILL", None])
def test_the_rehearsal_leaves_what_was_measured(tmp_path, number):
    command = [sys.executable, SCRIPTS / "gpu.py", "--rehearsal", tmp_path]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
    while number and not any("| LAMB, float32" in line for line in outcomes(tmp_path)[1]):
        assert process.poll() is None
        time.sleep(0.1)
    if number:
        os.kill(process.pid, Signals[number])
    assert (process.wait() == 0) is (number is None)
    rows, lines = outcomes(tmp_path)
    whole = {how.partition(",")[0] for how in rows.values()} == {"done"}
    assert (len(rows), whole) == (13, number is None), rows
    if number:
        cut = "missing**: it is not over" if number == "SIGKILL" else f"interrupted** by {number}"
        assert [*rows.values()] == ["done", f"**{cut}", *11 * ["**missing**: not begun"]]
    text = "\n".join(lines)
    apart = re.findall(r"^\| \w+, \w+ \| .*kernels \| (\S+) \|", text, re.M)
    assert 3 <= len(apart) <= 9
    assert max(map(float, apart)) < 1e-5  # of the weights by multi-tensor calls
    timed = re.findall(r"^\| (\w+)\(fused=True\) \| .*kernels \| .*: red", text, re.M)
    assert timed == ["LANS", "LAMB", "ScaledAdam"] * (1 if number else 3)
