"""A result that is recorded once is not recorded again."""

import math

from steadygrad.studies.advise.schema import Branch, Point
from steadygrad.studies.folder import Results, RunWriter, read_run
from tests.unit.studies.framework import begin, copy


def point(number, loss=2.0, **time):
    return Point(
        point=number, samples=8, steps=2, valid_loss=loss, curve=(), training=(), time=time
    )


def test_a_resumed_study_appends_only_what_is_new(tmp_path):
    begin(tmp_path / "run")
    folder = copy(tmp_path / "run", tmp_path / "copy")
    with RunWriter.resume(folder) as writer:
        journal = Journal(writer)
        journal.add(point(0, math.nan, seconds=1.0))
        journal.end("interrupted")
    events = read_run(folder).events
    with RunWriter.resume(folder) as writer:
        journal = Journal(writer, events)
        assert ("point", 0) in journal
        journal.add(point(0, math.nan, seconds=9.0))
        journal.add(point(1, 1.5))
        journal.end("complete", budget_seconds=60.0)
    events = read_run(folder).events
    assert [event.key[0] for event in events] == ["end", "point", "end", "point", "end"]
    assert (events[-1].status, events[-1].time) == ("complete", {"budget_seconds": 60.0})
    assert journal.differing == 0
    assert journal.get(Point, 0).time == {"seconds": 1.0}
    assert [event.point for event in journal.select(Point)] == [0, 1]


def test_other_numbers_are_noticed_and_the_recorded_ones_kept():
    journal = Results([point(0, 1.0)])
    journal.add(point(0, 1.25))
    assert journal.get(Point, 0).valid_loss == 1.0
    assert journal.differing == 1
    assert journal.get(Point, 1) is None
    assert journal.get(Branch, 0) is None
    assert journal.events() == [point(0, 1.0)]
