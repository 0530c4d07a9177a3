"""``steadygrad doctor``."""

import json
import re
import sys

import pytest
import torch

from steadygrad import __version__, distributed
from steadygrad._checks import install
from steadygrad.cli import commands, main
from steadygrad.optim import checks, loops
from steadygrad.optim.loops import runtime


@pytest.fixture
def examined(capsys, monkeypatch):
    """What is found, in this process."""
    # A warning is given once in a process.
    checks.warn_once.cache_clear()

    def run():
        assert main(["doctor", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_this_machine(examined, monkeypatch, capsys):
    # As PyPI's metadata, which leave out the build.
    monkeypatch.setattr(commands, "version", lambda package: "1.0")
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


def test_what_is_broken_or_wrong_ends_nothing(examined, monkeypatch):
    def raises():
        raise RuntimeError("no\naddress")

    monkeypatch.setattr(distributed, "check_gloo", raises)
    monkeypatch.setattr(runtime, "_run", lambda *_: None)
    found = examined()
    assert found["gloo"] == "fails: RuntimeError: no address"
    assert found["step on cpu"].startswith("fails: AssertionError: ")
    monkeypatch.setitem(loops.BROKEN, loops.ALL, "no compiler for this machine")
    assert examined()["step on cpu"].startswith("multi-tensor calls (")
    monkeypatch.setitem(sys.modules, "torch", None)
    assert examined()["import torch"].startswith("fails: ModuleNotFoundError: ")


def test_a_missing_extra_says_how_to_get_it(examined, monkeypatch):
    assert "missing cpu" not in examined()
    real = commands._version
    monkeypatch.setattr(commands, "_version", lambda name: None if name == "numba" else real(name))
    found = examined()
    assert found["numba"] is None
    assert found["missing cpu"] == install("cpu")
