"""Printed lines, and the stream that they are printed on."""

import math

import pytest
from rich.console import Console as RichConsole
from rich.table import Table

from steadygrad.cli.console import cleaned, complain, emit, note, printable, rendered
from steadygrad.cli.progress import BarMonitor, LineMonitor, Monitor, make_monitor
from steadygrad.studies.advise.report.terminal import table

CRITICAL = {"within": 32, "beyond": 64.0, "value": 40.2, "low": 30.0, "high": 70.0}
NOISE = {"value": 120.4, "low": 80.0, "high": 200.0, "resolved": True}


def point(noise=NOISE, critical=CRITICAL):
    return {"samples": 1024, "valid_loss": 2.34567, "noise": noise, "critical": critical}


def cells(case, checked=(), length=1024):
    summary = {
        "task": "tiny",
        "sample": "row",
        "points": [case],
        "recommendation": {"samples": length},
        "checked": list(checked),
    }
    found = table(summary)
    return [next(iter(column.cells)) for column in found.columns]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        (point(), ["1,024", "2.3457", "120 (80 to 200)", "32", "40 (30 to 70)"]),
        (point(noise={**NOISE, "resolved": False, "value": math.nan}), {2: "unresolved, above 80"}),
        (
            point(critical={**CRITICAL, "beyond": math.inf, "high": math.inf}),
            {3: "32 (all tried)", 4: "30 or more"},
        ),
        (point(critical={**CRITICAL, "high": math.inf}), {3: "32", 4: "40 (30 or more)"}),
        (point(critical={**CRITICAL, "value": math.nan}), {3: "unresolved", 4: "-"}),
        (point(noise=None, critical=None), {2: "-", 3: "-", 4: "-"}),
    ],
)
def test_a_row_of_the_table_of_advise(case, expected):
    found = cells(case)
    places = enumerate(expected) if isinstance(expected, list) else expected.items()
    assert {place: found[place] for place, _ in places} == dict(
        enumerate(expected) if isinstance(expected, list) else expected
    )
    assert found[5] == "-"


def test_runs_from_scratch_stand_at_the_point_where_they_end():
    runs = [{"batch_size": 2048, "overhead": 0.114}, {"batch_size": 4096, "overhead": 3.0}]
    assert cells(point(), runs)[5] == "2,048: +11%\n4,096: failed"
    assert cells(point(), runs, length=2048)[5] == "-"


def test_no_point_is_no_table():
    assert table({"points": []}) is None


def test_a_text_is_no_markup_and_no_emoji():
    found = Table("layer")
    found.add_row("blocks[bold]1[/bold] :smile:")
    out = rendered(found, "Train at [bold]32[/bold] :smile:.", stream=None)
    assert "blocks[bold]1[/bold] :smile:" in out
    assert out.endswith("Train at [bold]32[/bold] :smile:.")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer × 2", "größer × 2"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\r\nb\tc\x07", r"a\r\nb\tc\x07"),
        ("\x9b31m\x7f", r"\x9b31m\x7f"),
        ("abc\u202edcba", r"abc\u202edcba"),
        ("\udc80", r"\udc80"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
    nest = {text: [text, (1.5, None, True)], "b": {"c": text}}
    assert cleaned(nest) == {shown: [shown, [1.5, None, True]], "b": {"c": shown}}


def test_an_error_is_one_line(capsys):
    complain("Expected one\n  thing.\tFound \x1b[31mred.")
    assert capsys.readouterr().err == "steadygrad: Expected one thing. Found \\x1b[31mred.\n"


@pytest.mark.parametrize("write", [emit, note])
def test_what_a_stream_cannot_encode_is_escaped(write, monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stdout" if write is emit else "sys.stderr", stream)
        write("größer")
    assert (tmp_path / "out").read_text() == "gr\\xf6\\xdfer\n"


def test_which_monitor(monkeypatch):
    with make_monitor(True, lambda: math.inf) as monitor:
        assert type(monitor) is LineMonitor
    with make_monitor(False, lambda: math.inf) as monitor:
        assert type(monitor) is Monitor
    monkeypatch.setattr(RichConsole, "is_terminal", True)
    with make_monitor(True, lambda: math.inf) as monitor:
        assert type(monitor) is BarMonitor
        monitor.begin(100, 10, {})
        monitor.advance(5, "training")
        monitor.advance(5, "")
        monitor.say("a [line]")
        (task,) = monitor._progress.tasks
        assert (task.completed, task.total, task.description) == (20, 100, "training")
        monitor.advance(1, "[red]\x1b")
        assert task.description == r"[red]\x1b"
    with make_monitor(False, lambda: math.inf) as monitor:
        assert type(monitor) is Monitor
