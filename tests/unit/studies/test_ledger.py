"""What is recorded once is not recorded again."""

import math

from steadygrad.record import RunWriter, read_run
from steadygrad.studies.ledger import Ledger


def test_a_resumed_study_appends_only_what_is_new(tmp_path):
    with RunWriter.create(tmp_path / "run", {"study": "advise"}) as writer:
        ledger = Ledger(writer)
        ledger.add("train", point=0, samples=8, loss=2.0)
        ledger.add("noise", point=0, value=math.nan, time={"seconds": 1.0})
        ledger.end("interrupted")
    events = read_run(tmp_path / "run").events
    with RunWriter.resume(tmp_path / "run") as writer:
        ledger = Ledger(writer, events)
        assert ledger.add("train", point=0, samples=8, loss=2.0)["loss"] == 2.0
        ledger.add("train", point=0, samples=16, loss=1.5)
        ledger.add("noise", point=0, value=math.nan, time={"seconds": 9.0})
        ledger.end("complete", time={"budget_seconds": 60.0})
    events = read_run(tmp_path / "run").events
    assert [e["event"] for e in events] == ["train", "noise", "end", "train", "end"]
    assert events[-1] == {"event": "end", "status": "complete", "time": {"budget_seconds": 60.0}}
    assert ledger.differing == 0
    assert ledger.find("noise", 0)["time"] == {"seconds": 1.0}
    assert [e["samples"] for e in ledger.select("train")] == [8, 16]


def test_other_numbers_are_noticed_and_the_recorded_ones_kept():
    ledger = Ledger(
        None, [{"event": "branch", "point": 0, "repeat": 1, "multiple": 2, "loss": 1.0}]
    )
    kept = ledger.add("branch", point=0, repeat=1, multiple=2, loss=1.25)
    assert kept["loss"] == 1.0
    assert ledger.differing == 1
    assert ledger.find("branch", 0, 1, 4) is None
