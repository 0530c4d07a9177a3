"""A budget too small to say anything is an error, and no number is printed."""

import pytest

from steadygrad.cli import main
from steadygrad.record import read_run
from steadygrad.studies.advise import Stop
from tests.unit.studies.helpers import tiny


def test_a_budget_that_ends_before_the_first_point_is_no_advice(tmp_path, capsys):
    folder = tmp_path / "run"
    assert main(["advise", tiny("slow"), "--budget", "6s", "--out", str(folder)]) == 2
    err = capsys.readouterr().err
    assert "before the first point of training was measured: no number is given" in err
    assert "Remedy: go on by --resume RUN --budget TIME." in err
    assert read_run(folder).summary["recommendation"]["batch_size"] is None


@pytest.fixture
def over_after_the_noise_scale(tmp_path, monkeypatch):
    """The folder of a run whose budget ends once the first noise scale is in the record."""
    record = tmp_path / "run" / "record.jsonl"

    def left(stop):
        return 0.0 if record.exists() and b'"event": "noise"' in record.read_bytes() else 100.0

    monkeypatch.setattr(Stop, "left", left)
    return tmp_path / "run"


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["words", "json"])
def test_a_noise_scale_alone_is_no_advice(over_after_the_noise_scale, capsys, flags):
    """It stays in the record and on the page; what is printed is the error alone."""
    folder = over_after_the_noise_scale
    assert main(["advise", tiny(), "--budget", "100s", "--out", str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "no number is given" in err.splitlines()[-1]
    # Neither the table nor the words, with --json on stderr.
    assert "critical batch size" not in err
    assert "recommended" not in err
    run = read_run(folder)
    assert run.summary["status"] == "budget"
    assert run.select("noise")
    assert "noise scale" in (folder / "report.html").read_text()
