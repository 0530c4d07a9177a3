"""``steadygrad doctor``: values that an installation can be judged by."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from steadygrad import __version__, distributed
from steadygrad.cli import doctor, main
from steadygrad.optim import loops
from steadygrad.optim.loops import runtime
from tests.unit.cli.quick import ROOT


@pytest.fixture
def examined(capsys, monkeypatch):
    """What is found, in this process."""
    # A warning is given once in a process.
    monkeypatch.setattr(loops, "_WARNED", set())

    def run():
        assert main(["doctor", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_this_machine(examined, monkeypatch, capsys):
    # As PyPI's metadata, which leave out the build.
    monkeypatch.setattr(doctor, "version", lambda package: "1.0")
    found = examined()
    assert found["steadygrad"] == __version__
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    assert found["instruction set"] == torch.backends.cpu.get_cpu_capability()
    assert found["step on cpu"] == "compiled loops (Numba)"
    assert found["gloo"] == "works"
    assert not torch.distributed.is_initialized()
    # The text has a line for each value.
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [re.split(r" {2,}", line)[0] for line in lines] == [*found]
    pairs = zip(lines, found.values(), strict=True)
    assert all(line.endswith(f"  {value}") for line, value in pairs)


def test_a_step_without_loops_or_with_wrong_numbers_says_so(examined, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(loops.BROKEN, loops.ALL, "no compiler for this machine")
        found = examined()["step on cpu"]
    assert found.startswith("multi-tensor calls (")
    assert "no compiler for this machine" in found
    monkeypatch.setattr(runtime, "_run", lambda *_: None)
    assert examined()["step on cpu"].startswith("fails: AssertionError: ")


def test_what_is_broken_ends_nothing(examined, monkeypatch):
    def raises():
        raise RuntimeError("no\naddress")

    monkeypatch.setattr(distributed, "check_gloo", raises)
    monkeypatch.setitem(sys.modules, "numba.core.caching", None)
    found = examined()
    assert found["gloo"] == "fails: RuntimeError: no address"
    assert found["loops kept in"].startswith("fails: ModuleNotFoundError: ")
    monkeypatch.setitem(sys.modules, "torch", None)
    found = examined()
    assert found["import torch"].startswith("fails: ModuleNotFoundError: ")
    assert "gloo" not in found


def test_a_missing_extra_says_what_it_would_bring(examined, monkeypatch):
    text = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2]
    assert {*re.findall(r"^(\w+) = \[", text.partition("\n[")[0], re.M)} == {*doctor.BRINGS}
    assert "missing cpu" not in examined()
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "numba" else real(name))
    found = examined()
    assert found["numba"] is None
    assert found["missing cpu"] == f"{doctor.BRINGS['cpu']}: pip install 'steadygrad[cpu]'"


def test_it_needs_no_extra_and_shows_where_loops_are_kept(tmp_path):
    script = (
        "import sys; sys.modules.update(dict.fromkeys(['msgspec', 'rich', 'scipy']))\n"
        "from steadygrad.cli import main; main(['doctor', '--json'])"
    )
    command = [sys.executable, "-c", script]
    where = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    found = json.loads(subprocess.check_output(command, env=where, text=True))
    assert found["step on cpu"] == "compiled loops (Numba)"
    kept = {path.parent for path in tmp_path.rglob("layerwise.*.nbc")}
    assert kept == {Path(found["loops kept in"])}
