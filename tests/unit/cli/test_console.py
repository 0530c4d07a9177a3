"""Printed lines, the stream that they are printed on, and progress in a log and in a bar."""

import json
import math
import os
from types import SimpleNamespace

import pytest
from rich.cells import cell_len
from rich.console import Console

from steadygrad._checks import InputError
from steadygrad._studies import STUDIES
from steadygrad.cli.console import Monitor, drawn, emit, note, printable, rendered
from tests.unit.cli.quick import ROOT


def test_a_text_is_no_markup_and_no_emoji():
    row = ("blocks[bold]1[/bold] :smile:",)
    found = {"title": "[b]", "columns": ("layer",), "rows": (row,), "text_columns": 1}
    out = rendered(found, "Train at [bold]32[/bold] :smile:.", stream=None)
    assert "blocks[bold]1[/bold] :smile:" in out
    assert out.endswith("Train at [bold]32[/bold] :smile:.")


# Words of users: a path, wide letters, a command, marks that take no room.
LONG = ("a/b/" * 60 + "end", "字" * 90 + "end", "--lr 1 " * 40 + "end", "e\u0301" * 300 + "end")


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("study", STUDIES)
def test_a_table_has_two_lines_of_heads_and_one_for_each_row(study, width, long):
    table = json.loads((ROOT / f"docs/records/{study}/summary.json").read_text())["table"]
    words, rows = table["text_columns"], table["rows"]
    for number, row in enumerate(rows):
        row[:words] = [LONG[(number + j) % 4] for j in range(words)] if long else row[:words]
    empty, title, *lines = drawn(table, width).split("\n")
    assert (empty, title, lines.pop()) == ("", table["title"], "")
    assert max(map(cell_len, lines)) <= width
    (rule,) = (i for i, line in enumerate(lines) if line[0] == "─")
    assert rule <= 2
    shown, (absent, *_) = lines[rule + 1 :][: len(rows)], [*lines[rule + 1 + len(rows) :], ""]
    left_out = absent.removeprefix("On the page also: ").rstrip(".").split(", ")
    assert not {*left_out} & {*table["columns"][: words + 1]} - {""}
    # Numbers are whole, and words end as they do.
    for row, line in zip(rows, shown, strict=True):
        for i, name in enumerate(table["columns"]):
            assert (row[i] if i >= words else row[i][-3:]) in line or name in left_out


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("größer × 2", "größer × 2"),
        ("a\x1b[2Jb", r"a\x1b[2Jb"),
        ("a\r\nb\tc\x07", r"a\r\nb\tc\x07"),
        ("abc\u202edcba", r"abc\u202edcba"),
        ("\udc80", r"\udc80"),
    ],
)
def test_control_characters_are_escaped(text, shown):
    assert printable(text) == shown
    found = {"title": text, "columns": ("a",), "rows": ((text,),), "text_columns": 1}
    assert rendered(found, text, stream=None).count(shown) == 3


def test_a_line_is_written_in_what_the_stream_can_encode(monkeypatch, tmp_path):
    with (tmp_path / "err").open("w", encoding="ascii") as stream:
        monkeypatch.setattr("sys.stderr", stream)
        note("Expected ö.")
    assert (tmp_path / "err").read_text() == "Expected \\xf6.\n"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_progress_that_nobody_can_read_ends_no_study(monkeypatch):
    with open("/dev/full", "w") as out, open("/dev/full", "w") as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        note("a line")
        with pytest.raises(InputError, match="No space left"):
            emit("a result")
    # A process may be started with it closed.
    monkeypatch.setattr("sys.stdout", None)
    emit("a result")


def paced(budget=math.inf, *, done=0):
    """A clock that stands still until it is moved, and a monitor of 1,000 samples."""
    clock = SimpleNamespace(now=0.0)
    monitor = Monitor(True, lambda: budget - clock.now, lambda: clock.now)
    monitor.begin(1000, done)
    return clock, monitor


def test_a_line_every_half_minute(capsys):
    clock, monitor = paced(600, done=100)
    for _ in range(90):
        clock.now += 1
        monitor.advance(10, "training\x1b")
    monitor.say("a\nb")
    first, *lines, said = capsys.readouterr().err.splitlines()
    assert first == "work done: 100 of 1,000"
    assert [" ".join(line.split()) for line in lines] == [
        r"training\x1b 40% 0:01:00 left, budget 9.5 min",
        r"training\x1b 70% 0:00:30 left, budget 9.0 min",
        r"training\x1b 100% 0:00:00 left, budget 8.5 min",
    ]
    assert said == r"steadygrad: a\nb"


def test_work_that_was_done_before_tells_no_speed():
    clock, monitor = paced(done=400)
    for _ in range(11):
        clock.now += 1
        monitor.advance(10, "")
    assert monitor.task.completed == 510
    # 10 in a second.
    assert monitor.task.time_remaining == 49


def test_a_terminal_has_a_bar_and_lines_above_it(monkeypatch, capsys):
    monkeypatch.setattr(Console, "is_terminal", True)
    monitor = Monitor(True, lambda: 90.0)
    with monitor.bar:
        monitor.begin(100, 10)
        monitor.advance(10, "[red]\x1b")
        monitor.say("a [line]")
        monitor.bar.refresh()
    err = capsys.readouterr().err
    assert "steadygrad: a [line]\n" in err
    assert "work done" not in err
    for word in (r"[red]\x1b", " 20%", "left, budget 1.5 min"):
        assert word in err
