"""What tests of the command line share."""

import pytest

from steadygrad.cli import main
from tests.unit.studies.helpers import one_thread

__all__ = ["one_thread", "refused"]


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Runs the program on bad input, checks what all bad input has in common, gives its line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, writes=False):
        before = sorted(tmp_path.rglob("*"))
        assert main(list(arguments)) == 2
        out, err = capsys.readouterr()
        assert out == ""
        lines = [line for line in err.splitlines() if "samples of work" not in line]
        if not writes:
            assert sorted(tmp_path.rglob("*")) == before
            assert len(lines) == 1
        assert lines[-1].startswith("steadygrad: ")
        assert "Traceback" not in err
        return lines[-1]

    return run
