"""A budget too small to say anything is an error, and no number is printed."""

import pytest

from steadygrad.cli import main
from steadygrad.studies.advise.schema import Scratch
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.folder import read_run
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import tiny


@pytest.fixture
def over_after(tmp_path, monkeypatch):
    """Ends the budget once a result of a kind is there; ``"run"``: once the header is."""
    folder = tmp_path / "run"

    def end(kind):
        def left(deadline):
            name = "header.json" if kind == "run" else f"results/{kind}-*.json"
            return 0.0 if any(folder.glob(name)) else 100.0

        monkeypatch.setattr(Deadline, "left", left)
        return folder

    return end


@pytest.mark.parametrize("flags", [[], ["--json"]], ids=["words", "json"])
@pytest.mark.parametrize("kind", ["run", "scratch"])
def test_without_a_comparison_there_is_no_advice(over_after, kind, flags, capsys):
    """A training stays in the record and on the page; what is printed is the error alone."""
    folder = over_after(kind)
    assert main(["advise", tiny(), *PLAIN, "--out", str(folder), *flags]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == (
        "steadygrad: The budget was over before one batch size was compared with another. "
        f"Found {str(folder)!r} unfinished, as {str(folder / 'report.html')!r} shows. Remedy: "
        f"continue with --resume {folder} --budget TIME."
    )
    # Neither the table nor the words, with --json on stderr.
    assert "validation" not in err
    assert "Nothing can be said" not in err
    run = read_run(folder)
    assert run.summary["status"] == "budget"
    assert run.summary["recommendation"]["batch_size"] is None
    assert len(run.select(Scratch)) == (kind == "scratch")
    assert (folder / "report.html").exists()
