"""The whole study on a tiny task."""

import math

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.record import dumps, read_run
from steadygrad.studies.advise import Settings, Stop, make_plan
from steadygrad.studies.advise.ledger import Ledger
from steadygrad.studies.advise.plan import START_UP
from steadygrad.studies.advise.summary import summarize
from tests.unit.studies.helpers import Watcher, make_engine, study, timeless


def test_it_records_everything_that_was_planned(whole):
    outcome, _ = whole
    run = read_run(outcome.folder)
    plan = make_plan(120.0, 200.0, batch_size=4, train_size=4096, valid_size=64)
    assert run.header["plan"]["points"] == [point.samples for point in plan.points]
    assert [e["samples"] for e in run.select("point")] == run.header["plan"]["points"]
    assert len(run.select("noise")) == len(run.select("critical")) == len(plan.points)
    expected = [
        (i, k, r)
        for i, point in enumerate(plan.points)
        for r in range(plan.repeats)
        for k in point.multiples
    ]
    branches = run.select("branch")
    assert [(e["point"], e["multiple"], e["repeat"]) for e in branches] == expected
    for event in branches:
        assert event["batch_size"] == 4 * event["multiple"]
        point = plan.points[event["point"]]
        assert event["steps"] == point.branch_samples // event["batch_size"]
        assert event["lr"] == pytest.approx(0.001 * math.sqrt(event["multiple"]))
        assert event["curve"][-1] == [event["samples"], event["loss"]]
        # Marks too near the end of a short branch are left out.
        assert len(event["curve"]) in ((7, 8) if event["multiple"] == 1 else (1,))
    assert run.events[-1]["event"] == "end"
    assert run.events[-1]["status"] == outcome.summary["status"] == "complete"


def test_training_is_recorded_as_it_went(whole):
    run = read_run(whole[0].folder)
    samples = [event["samples"] for event in run.select("train")]
    assert samples == sorted(set(samples))
    assert samples[-1] == run.header["plan"]["points"][-1]
    assert all(e["steps"] == e["samples"] // 4 for e in run.select("train"))
    losses = [event["valid_loss"] for event in run.select("point")]
    assert losses[-1] < losses[0]


def test_the_header_says_what_was_run(whole):
    header = read_run(whole[0].folder).header
    assert header["task"]["parameters"] == 8 * 16 + 16 + 16 + 1
    assert header["task"]["provenance"]["sha256"] == "0" * 64
    assert header["settings"]["device"] == "cpu"
    assert header["settings"]["threads"] == 1
    assert header["settings"]["batch_size"] == 4


def test_the_summary_recommends(whole):
    outcome, _ = whole
    kept = read_run(outcome.folder).summary
    assert dumps(kept) == dumps(outcome.summary)
    advice = outcome.summary["recommendation"]
    assert advice["batch_size"] in (4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert advice["low"] <= advice["high"]
    assert advice["lr"] == pytest.approx(0.001 * math.sqrt(advice["batch_size"] / 4))
    assert advice["trust"] == "critical"
    assert advice["megatron"].startswith("0:")
    assert f"Train at a batch of {advice['batch_size']} row" in advice["words"][0]
    assert any("noise scale" in sentence for sentence in advice["words"])


def test_progress_ends_where_the_plan_does(whole):
    _, monitor = whole
    assert monitor.done == pytest.approx(monitor.total, rel=0.01)
    assert any(stage.startswith("noise scale at") for stage in monitor.stages)


def test_checkpoints_are_gone_when_it_is_complete(whole):
    names = sorted(path.name for path in whole[0].folder.iterdir())
    assert names == ["record.jsonl", "summary.json"]


def test_one_seed_one_record(whole, tmp_path):
    again = study(tmp_path / "again")
    assert timeless(again.folder) == timeless(whole[0].folder)
    assert dumps(again.summary) == dumps(whole[0].summary)
    other = study(tmp_path / "other", seed=1)
    assert other.summary["points"][0]["valid_loss"] != again.summary["points"][0]["valid_loss"]


def test_the_monitor_knows_when_each_point_is_measured(whole):
    outcome, monitor = whole
    run = read_run(outcome.folder)
    samples = run.header["plan"]["points"]
    assert list(monitor.points) == [f"{n:,} rows" for n in samples]
    assert list(monitor.points.values())[-1] == monitor.total


def test_a_short_study_recommends_nothing(tmp_path):
    stop = Stop()
    watcher = Watcher(at=300, call=lambda: stop.limit(-1e9))
    advice = study(tmp_path / "run", stop=stop, monitor=watcher).summary["recommendation"]
    assert advice["batch_size"] is None
    assert advice["schedule"] == []
    assert advice["words"][0].startswith("No batch size can be recommended yet")


def test_the_budget_ends_the_study(tmp_path):
    """A step takes 0.01 s here, more than ten times what the plan reckons with."""
    outcome = study(tmp_path / "run", "slow", budget=1.5 + START_UP)
    assert outcome.summary["status"] == "budget"
    work = sum(e["samples"] for e in read_run(outcome.folder).select("branch"))
    assert work < read_run(outcome.folder).header["plan"]["work"]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_other_precisions(whole, tmp_path, dtype):
    outcome = study(tmp_path / "run", dtype=dtype, budget=40.0)
    noise, point = (outcome.summary["points"][0][name] for name in ("noise", "valid_loss"))
    same = study(tmp_path / "same", budget=40.0).summary["points"][0]
    # The same training to the precision of the type; loss scaling changes nothing.
    rel = {"bfloat16": 0.05, "float16": 0.02, "float64": 1e-5}[dtype]
    assert point == pytest.approx(same["valid_loss"], rel=rel)
    assert noise["noise_trace"] == pytest.approx(same["noise"]["noise_trace"], rel=3 * rel)
    assert outcome.summary["status"] == "complete"


def test_a_branch_that_diverges_is_a_result(tmp_path):
    outcome = study(tmp_path / "run", "diverging_branches", budget=300.0)
    branches = read_run(outcome.folder).select("branch")
    lost = {event["multiple"] for event in branches if math.isinf(event["loss"])}
    assert 8 in lost
    assert 1 not in lost
    assert outcome.summary["status"] == "complete"
    assert outcome.summary["points"][-1]["critical"]["excess"]["64"] == 3.0


@pytest.mark.parametrize(("lost", "measured"), [(0, True), (1, False)])
def test_a_point_cut_short_counts_with_two_whole_repeats(whole, lost, measured):
    run = read_run(whole[0].folder)
    last = len(run.header["plan"]["points"]) - 1
    branches = [event for event in run.select("branch") if event["point"] == last]
    cut = [
        event
        for event in run.events
        if (event["event"], event.get("point")) != ("critical", last)
        and event not in branches[len(branches) - lost :]
    ]
    points = summarize(run.header, Ledger(None, cut), "budget")["points"]
    assert (points[last]["critical"] is not None) == measured
    if measured:
        assert points[last]["critical"] == whole[0].summary["points"][last]["critical"]
    assert points[0]["critical"] == whole[0].summary["points"][0]["critical"]


def test_a_speed_that_is_not_known_is_measured(tmp_path):
    stop = Stop()
    watcher = Watcher(at=200, call=lambda: stop.limit(-1e9))
    outcome = study(tmp_path / "run", "unmeasured", stop=stop, monitor=watcher)
    speed = read_run(outcome.folder).header["plan"]["samples_per_second"]
    assert speed > 0
    assert math.log2(speed) == int(math.log2(speed))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("dtype", "int8"),
        ("device", "tpu"),
        ("tolerance", 0.0),
        ("budget_seconds", 0.0),
        ("seed", -1),
    ],
)
def test_settings_are_checked(name, value):
    with pytest.raises(InputError, match=f"Parameter `{name}`"):
        Settings(**{name: value})


def test_evaluating_does_not_disturb_training():
    engine = make_engine()
    engine.seed_everything("before")
    expected = torch.rand(3)
    engine.seed_everything("before")
    first = engine.evaluate()
    assert torch.equal(torch.rand(3), expected)
    assert engine.evaluate() == first
    assert all(module.training for module in engine.model.modules())
