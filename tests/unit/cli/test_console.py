"""What is printed."""

import math
from pathlib import Path

import pytest
from rich.console import Console as RichConsole

from steadygrad.cli.console import Console, make_monitor, print_summary
from steadygrad.cli.progress import BarMonitor, LineMonitor, SilentMonitor

CRITICAL = {"value": 40.2, "low": 30.0, "high": 50.0, "at_edge": ""}
NOISE = {"value": 120.4, "low": 80.0, "high": 200.0, "resolved": True}


def printed(capsys, points, words=("Train at [bold]32[/bold].",), **options) -> str:
    summary = {
        "task": "tiny",
        "sample": "row",
        "points": points,
        "recommendation": {"words": list(words)},
    }
    print_summary(summary, Path("runs/x/report.html"), Console(**options))
    return capsys.readouterr().out


def point(noise=NOISE, critical=CRITICAL):
    return {"samples": 1024, "valid_loss": 2.34567, "noise": noise, "critical": critical}


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (point(), ["1,024", "2.3457", "120 (80 to 200)", "40 (30 to 50)"]),
        (point(noise={**NOISE, "resolved": False, "value": math.nan}), ["unresolved, above 80"]),
        (point(critical={**CRITICAL, "at_edge": "above"}), ["40 or more"]),
        (point(critical={**CRITICAL, "high": math.inf}), ["40 (30 or more)"]),
        (point(critical={**CRITICAL, "value": math.nan}), ["unresolved"]),
        (point(noise=None, critical=None), [" - "]),
    ],
)
def test_a_row_of_the_table(capsys, case, expected):
    out = printed(capsys, [case])
    assert all(text in out for text in expected)


def test_words_are_no_markup_and_the_report_is_named(capsys):
    out = printed(capsys, [])
    assert "Train at [bold]32[/bold]." in out
    assert out.endswith("\nReport: runs/x/report.html\n")
    assert "validation loss" not in out


def test_with_json_stdout_stays_free(capsys):
    assert printed(capsys, [point()], json=True) == ""


def test_which_monitor():
    console = Console()
    console.errors = RichConsole(force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with make_monitor(console, True, lambda: math.inf) as monitor:
        assert isinstance(monitor, BarMonitor)
        monitor.begin(100, 10, {})
        monitor.advance(5, "training")
        monitor.advance(5, "")
        monitor.say("a [line]")
        (task,) = monitor._progress.tasks
        assert (task.completed, task.total, task.description) == (20, 100, "training")
    console.errors.file.close()
    console.errors = RichConsole(force_terminal=False)
    with make_monitor(console, True, lambda: math.inf) as monitor:
        assert isinstance(monitor, LineMonitor)
    with make_monitor(console, False, lambda: math.inf) as monitor:
        assert isinstance(monitor, SilentMonitor)
