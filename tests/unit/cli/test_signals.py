"""The program, killed and interrupted."""

import random
import signal
import time

import pytest

from steadygrad.studies.folder import read_run
from steadygrad.studies.schema import End
from steadygrad.studies.strict_json import dumps
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import program, tiny
from tests.unit.record.helpers import strip_times


def lines(folder):
    path = folder / "record.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def wait_for_lines(process, folder, count):
    """Waits until a record is so long, or the program has ended."""
    while process.poll() is None and lines(folder) < count:
        time.sleep(0.002)


def contents(folder):
    events = (event.as_dict() for event in read_run(folder).events)
    return [dumps(strip_times(event)) for event in events if event["kind"] != "end"]


@pytest.mark.slow
def test_killed_three_times_and_resumed_to_the_same_summary(whole, tmp_path):
    """SIGKILL at random moments: nothing can be tidied up, and nothing is lost."""
    total, folder = lines(whole[0]), tmp_path / "killed"
    moments = random.Random(20).sample(range(2, total - 2), 3)
    for number, moment in enumerate(sorted(moments)):
        begin = [tiny("talkative"), *PLAIN, "--out", str(folder)]
        process = program("advise", *(["--resume", str(folder)] if number else begin))
        wait_for_lines(process, folder, moment)
        process.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err
    assert lines(folder) < total
    process = program("advise", "--resume", str(folder))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (folder / "summary.json").read_bytes() == (whole[0] / "summary.json").read_bytes()
    assert contents(folder) == contents(whole[0])
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_a_signal_leaves_a_partial_report(tmp_path, number, code):
    folder = tmp_path / "run"
    process = program("advise", tiny("slow"), *PLAIN, "--budget", "1h", "--out", str(folder))
    wait_for_lines(process, folder, 1)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "Nothing can be said yet" in " ".join(out.split())
    run = read_run(folder)
    assert run.summary["status"] == "interrupted"
    assert [end.status for end in run.select(End)] == ["interrupted"]
    assert (folder / "report.html").stat().st_size > 1000
