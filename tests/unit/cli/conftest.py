"""Fixtures of the tests of the command line."""

import shutil

import pytest

from steadygrad.cli import main
from tests.unit.cli.quick import quick, tiny
from tests.unit.studies.conftest import one_thread  # noqa: F401

# A study chooses by itself unless these say otherwise; the tests' machines differ.
PLAIN = ("--device", "cpu", "--workers", "1", "--threads", "1")


@pytest.fixture(autouse=True)
def small_plans():
    with quick():
        yield


@pytest.fixture
def refused(tmp_path, capsys, monkeypatch):
    """Runs the program on bad input, checks what all bad input has in common, gives its line."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments, writes=False):
        before = sorted(tmp_path.rglob("*"))
        assert main(list(arguments)) == 2
        out, err = capsys.readouterr()
        # A study that fails later prints what it measured.
        assert out == "" or (writes and "The study failed" in " ".join(out.split()))
        lines = [line for line in err.splitlines() if line.startswith("steadygrad: ")]
        if not writes:
            assert sorted(tmp_path.rglob("*")) == before
            assert err == f"{lines[0]}\n"
        assert len(lines) == 1
        assert err.endswith(f"{lines[0]}\n")
        assert "Traceback" not in err
        return lines[0]

    return run


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of a complete run."""
    folder = tmp_path_factory.mktemp("cli") / "run"
    with quick():
        assert main(["advise", tiny("talkative"), "--quiet", *PLAIN, "--out", str(folder)]) == 0
    return folder


@pytest.fixture
def folder(whole, tmp_path):
    """A copy of the complete run."""
    return shutil.copytree(whole, tmp_path / "run")
