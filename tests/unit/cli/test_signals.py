"""The program, interrupted."""

import signal
import time

import pytest

from steadygrad.studies.folder import read_run
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import program, tiny


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
