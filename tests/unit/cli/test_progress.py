"""Progress in a log and in a bar; no test here waits or reads a real clock."""

import math

import pytest
from rich.console import Console

from steadygrad.cli.progress import Monitor, make_monitor


class Clock:
    """Stands still until it is moved; ``left`` is what remains of a budget that began at 0."""

    def __init__(self, budget=math.inf):
        self.now, self.budget = 0.0, budget

    def __call__(self):
        return self.now

    def left(self):
        return self.budget - self.now


def paced(budget=math.inf, *, done=0):
    """A clock, and a monitor of 1,000 samples."""
    clock = Clock(budget)
    monitor = Monitor(True, clock.left, clock)
    monitor.begin(1000, done)
    return clock, monitor


def test_a_line_every_half_minute(capsys):
    clock, monitor = paced(600, done=100)
    for number in range(90):
        clock.now += 1
        monitor.advance(10, "" if number % 2 else "training\x1b")
    monitor.say("a\nb")
    first, *lines, said = capsys.readouterr().err.splitlines()
    assert first == "1,000 samples of work, 100 of them done"
    assert [" ".join(line.split()) for line in lines] == [
        r"training\x1b 40% 0:01:00 left, budget 9.5 min",
        r"training\x1b 70% 0:00:30 left, budget 9.0 min",
        r"training\x1b 100% 0:00:00 left, budget 8.5 min",
    ]
    assert said == r"steadygrad: a\nb"


@pytest.mark.parametrize("skipped", [0, 400])
def test_work_of_others_and_work_that_is_not_needed_tell_no_speed(skipped):
    clock, monitor = paced(done=400)
    if skipped:
        monitor.advance(10, "")
        clock.now = 5.0
        monitor.skip(skipped)
    for _ in range(11):
        clock.now += 1
        monitor.advance(10, "")
    assert monitor.task.completed == 510 + 10 * bool(skipped)
    # 10 in a second.
    assert monitor.task.time_remaining == (49 if not skipped else 8)


def test_which_monitor(monkeypatch, capsys):
    with make_monitor(True, lambda: math.inf) as monitor:
        monitor.say("a line")
    with make_monitor(False, lambda: math.inf) as monitor:
        monitor.begin(100, 10)
        monitor.printed -= 40
        monitor.advance(5, "no line")
        monitor.say("no line")
    assert capsys.readouterr().err == "steadygrad: a line\n"
    monkeypatch.setattr(Console, "is_terminal", True)
    with make_monitor(True, lambda: 90.0) as monitor:
        monitor.begin(100, 10)
        monitor.advance(10, "[red]\x1b")
        monitor.say("a [line]")
        monitor.bar.refresh()
    err = capsys.readouterr().err
    assert "steadygrad: a [line]\n" in err
    assert "samples of work" not in err
    for word in (r"[red]\x1b", " 20%", "left, budget 1.5 min"):
        assert word in err
