"""The program, killed and interrupted."""

import random
import signal
import time

import pytest

from steadygrad.studies.folder import read_run
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import program, tiny
from tests.unit.studies.framework import lines, recorded


def wait_for_results(process, folder, count):
    """Waits until so many results are there, or the program has ended."""
    while process.poll() is None and recorded(folder) < count:
        time.sleep(0.002)


@pytest.mark.slow
def test_killed_three_times_and_resumed_to_the_same_summary(whole, tmp_path):
    """SIGKILL at random moments: nothing can be tidied up, and nothing is lost."""
    total, folder = recorded(whole[0]), tmp_path / "killed"
    moments = random.Random(20).sample(range(1, total - 2), 3)
    for number, moment in enumerate(sorted(moments)):
        begin = [tiny("talkative"), *PLAIN, "--out", str(folder)]
        process = program("advise", *(["--resume", str(folder)] if number else begin))
        wait_for_results(process, folder, moment)
        process.kill()
        _, err = process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL, err
    assert recorded(folder) < total
    process = program("advise", "--resume", str(folder))
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert (folder / "summary.json").read_bytes() == (whole[0] / "summary.json").read_bytes()
    assert lines(folder) == lines(whole[0])
    assert not (folder / "checkpoints").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "term"]
)
def test_a_signal_leaves_a_partial_report(tmp_path, number, code):
    folder = tmp_path / "run"
    process = program("advise", tiny("slow"), *PLAIN, "--budget", "1h", "--out", str(folder))
    while process.poll() is None and not (folder / "results").is_dir():
        time.sleep(0.002)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    assert "Traceback" not in err
    assert "Nothing can be said yet" in " ".join(out.split())
    run = read_run(folder)
    assert run.summary["status"] == "interrupted"
    assert (folder / "report.html").stat().st_size > 1000
