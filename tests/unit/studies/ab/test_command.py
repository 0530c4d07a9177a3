"""Commands: their metric, and how they fail and end."""

import resource
import sys

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.ab.command import metric_of, run_command
from steadygrad.studies.ab.schema import Settings
from tests.unit.studies.framework import alive, wait_for


def run(command, cwd=".", poll=lambda: None, timeout=0.0):
    return run_command(command, str(cwd), Settings(metric=r"x=(\S+)", timeout=timeout), poll)


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        ("x=1\nx=-2e-3\ny=5", r"x=(\S+)", -2e-3),
        ("x=1\nx=oops", r"x=(\S+)", None),
        ('{"x": 1}\n{"x": 0.5, "y": 2}\n{"y": 3}\nnot json\n[1]\n7', "x", 0.5),
        ('{"x": 1}\n{"x": null}', "x", None),
        ('{"x": 1}\n{"x": -nan}', "x", None),
        ('{"\\u00e9": 2}', "é", 2.0),
        ('{"x": 1}\n{"x": 0.5, "y": "\u2028"}', "x", 0.5),
        ("[[[" * 9999, "x", None),
        ('{"x": 1%s}' % ("0" * 400), "x", None),
        ("x=1\nx=nan", r"x=([0-9.]+)", None),
        ("x=5.4e-06", r"x=([0-9.]+)", None),
        ("x=0.54", r"x=([0-9])", None),
        ("1\n2", r"([0-9.]+)", 2.0),
        ("-0.5", r"([0-9.]+)", None),
        ("0.5", r"(?m)^([0-9.]+)$", 0.5),
        ("loss (val)=0.5", r"loss [(]val[)]=(\S+)", 0.5),
        ("loss=0.5", r"(?:loss=([0-9.]+))", 0.5),
        ("loss=0.5\nloss=nan", r"loss=(?P<value>[0-9.]+)", None),
    ],
)
def test_the_last_metric_counts(text, metric, value):
    assert metric_of(text, metric) == value


def test_a_command_runs_in_its_folder_and_prints_to_either_stream(tmp_path):
    (tmp_path / "here").write_text("x=3.5")
    assert run("cat here 1>&2", tmp_path)[0] == 3.5


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo x=1; echo bye; exit 7", "exit code 7, after 'bye'"),
        ("echo x=1; kill -TERM $$", "ended by signal 15, after 'x=1'"),
        ("echo 'y=1'", "no number .*, after 'y=1'"),
        ("true", "no number .*, after ''"),
        # It has no input, and no children that it did not start.
        (
            f"exec {sys.executable} -c 'import os, sys; sys.stdin.read(); os.wait()'",
            "No child processes",
        ),
    ],
)
def test_a_run_that_fails_says_why(command, why):
    with pytest.raises(InputError, match=why):
        run(command, timeout=60)


@pytest.mark.parametrize("end", ["timeout", "interrupted", "done"])
def test_nothing_of_a_command_is_left(end, tmp_path):
    """Nor of its grandchildren."""
    path = tmp_path / "pid"
    command = f"sleep 60 & echo $! > {path}; echo x=1"

    def poll():
        if end == "interrupted" and path.exists() and path.read_text():
            raise KeyboardInterrupt

    if end == "done":
        assert run(command)[0] == 1
    else:
        expected = {"timeout": InputError, "interrupted": KeyboardInterrupt}[end]
        with pytest.raises(expected):
            run(f"({command}; wait)", poll=poll, timeout=0.5 * (end == "timeout"))
    pid = int(path.read_text())
    wait_for(lambda: not alive(pid), 10)


def test_the_peak_of_memory_is_the_commands_own():
    """A process starts with its parent's: less than that cannot be told."""
    assert run("echo x=1")[1] == {}
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    size = own + (1 << 28)
    _, took = run(f'{sys.executable} -c \'b = b"x" * {size}; print("x=1")\'')
    assert 1.0 <= took["peak_bytes"] / size < 1.2
