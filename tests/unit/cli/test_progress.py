"""Time left, and what is said about it; no test here waits or reads a real clock."""

import math
from itertools import pairwise

import pytest

from steadygrad.cli.progress import Monitor, duration


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
    monitor = Monitor(clock.left, clock, lambda line: None)
    monitor.begin(1000, done)
    return clock, monitor


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (math.inf, "?"),
        (-3, "0s"),
        (0.4, "0s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3900, "1h05m"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("budget", "left"),
    [(math.inf, 90), (1000, 90), (40, 30)],
    ids=["no budget", "budget to spare", "budget ends first"],
)
def test_time_left_is_that_of_the_work_or_of_the_budget(budget, left):
    clock, monitor = paced(budget)
    monitor.advance(100, "")
    clock.now = 10.0
    assert monitor.left() == pytest.approx(left)
    assert monitor.part == 0.1


def test_only_the_work_of_this_process_tells_the_speed():
    clock, monitor = paced(done=500)
    monitor.advance(100, "")
    clock.now = 10.0
    assert monitor.part == 0.6
    assert monitor.left() == pytest.approx(40)


def test_work_that_is_not_needed_tells_no_speed():
    clock, monitor = paced(100)
    monitor.advance(100, "")
    clock.now = 10.0
    monitor.skip(400)
    assert monitor.part == 0.5
    assert monitor.left() == 50  # at 10 a second


def test_nothing_is_known_before_the_first_step():
    assert paced()[1].left() == math.inf
    assert paced(60)[1].left() == 60


def test_a_step_after_a_long_repetition_tells_no_speed():
    """A resumed study repeats up to a point before it does what is counted."""
    clock, monitor = paced(60, done=500)
    clock.now = 20.0
    monitor.advance(8, "")
    assert monitor.left() == 40
    monitor.advance(92, "")
    assert monitor.left() == 40  # 100 in 20 s: 80 s of work, cut by the budget


def test_more_work_than_planned_is_no_time_below_zero():
    clock, monitor = paced()
    clock.now = 1.0
    monitor.advance(1500, "")
    assert (monitor.part, monitor.left()) == (1.0, 0.0)


def lines_of(capsys, clock, monitor, steps, seconds):
    """Lines printed while so many equal steps take so many seconds."""
    monitor.begin(1000, 0)
    for number in range(steps):
        clock.now = (number + 1) * seconds / steps
        monitor.advance(1000 // steps, f"step at {clock.now:g}")
    return capsys.readouterr().err.splitlines()[1:]


def test_a_line_at_every_twentieth(capsys):
    clock = Clock()
    monitor = Monitor(clock.left, clock)
    monitor.begin(1000, 100)
    for _ in range(900):
        clock.now += 0.02
        monitor.advance(1, "training")
    monitor.advance(10, "")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "1,000 samples of work, 100 of them done"
    assert [line.split("%")[0].strip() for line in lines[1:]] == [str(p) for p in range(15, 101, 5)]
    assert lines[1] == " 15%     17s left  training"
    assert all(line.endswith("s left  training") for line in lines[1:])


def test_a_line_at_least_every_twenty_seconds_in_ten_minutes(capsys):
    clock = Clock()
    lines = lines_of(capsys, clock, Monitor(clock.left, clock), 1000, 600)
    moments = [0.0, *(float(line.split()[-1]) for line in lines)]
    gaps = [later - earlier for earlier, later in pairwise(moments)]
    # A step takes 0.6 s.
    assert max(gaps) <= 20.6
    assert len(lines) <= 20 + 30


@pytest.mark.parametrize("hours", [1, 24, 240])
def test_a_long_study_does_not_flood_a_log(capsys, hours):
    clock = Clock()
    monitor = Monitor(clock.left, clock)
    # Ten times the work: hardly a twentieth is ever done.
    monitor.begin(10**6, 0)
    for _ in range(hours * 3600 // 5):
        clock.now += 5
        monitor.advance(1, "slow")
    lines = capsys.readouterr().err.splitlines()
    assert 30 < len(lines) < 300
    assert len(lines) > 2 * hours or hours > 24


def test_lines_are_clean(capsys):
    """The task's own words, in the line of progress, are printed without control characters."""
    clock = Clock()
    monitor = Monitor(clock.left, clock)
    monitor.begin(10, 0)
    monitor.advance(10, "run\x1b[2J")
    monitor.say("a\nb")
    lines = capsys.readouterr().err.splitlines()
    assert lines[1:] == [r"100%      0s left  run\x1b[2J", r"steadygrad: a\nb"]
