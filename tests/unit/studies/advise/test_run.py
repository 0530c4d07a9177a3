"""The whole study on a tiny task."""

import json
import math
import signal
import time

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.record import dumps, read_run
from steadygrad.studies.advise import Settings, Stop, make_plan, resume
from steadygrad.studies.advise.checkpoint import Checkpoints
from steadygrad.studies.advise.engine import Engine
from steadygrad.studies.advise.ledger import Ledger
from steadygrad.studies.advise.order import main_order
from steadygrad.studies.advise.plan import START_UP
from steadygrad.studies.advise.ranks import Ranks
from steadygrad.studies.advise.summary import summarize
from steadygrad.tasks import load_task
from tests.unit.studies.helpers import Watcher, study, timeless, tiny


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One complete study, shared by the tests that only read it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    monitor = Watcher()
    return study(folder, monitor=monitor), monitor


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


@pytest.mark.parametrize("share", [0.03, 0.4, 0.8], ids=["early", "middle", "late"])
def test_interrupted_and_resumed_to_the_same_numbers(whole, tmp_path, share):
    stop, (complete, monitor) = Stop(), whole
    watcher = Watcher(at=int(share * monitor.total), call=lambda: stop._handle(signal.SIGINT, None))
    try:
        first = study(tmp_path / "run", stop=stop, monitor=watcher)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    assert first.stopped_by == signal.SIGINT
    assert first.summary["status"] == "interrupted"
    assert (tmp_path / "run" / "summary.json").exists()
    second = resume(tmp_path / "run", monitor=Watcher())
    assert dumps(second.summary) == dumps(complete.summary)
    kept, wanted = (
        [e for e in timeless(folder)[1] if '"end"' not in e]
        for folder in (tmp_path / "run", complete.folder)
    )
    assert kept == wanted


def test_resuming_repeats_no_work(whole, tmp_path):
    stop, (_, monitor) = Stop(), whole
    watcher = Watcher(at=int(0.8 * monitor.total), call=lambda: stop.limit(-1e9))
    first = study(tmp_path / "run", stop=stop, monitor=watcher)
    assert first.summary["status"] == "budget"
    assert first.stopped_by == 0
    watcher = Watcher()
    resume(tmp_path / "run", monitor=watcher)
    assert not any(stage.startswith("training") for stage in watcher.stages)
    watcher = Watcher()
    resume(tmp_path / "run", monitor=watcher)
    assert watcher.stages == []


def test_more_time_is_the_same_study(whole, tmp_path):
    """Cut short twice: the plan is that of the record, whatever time it is given."""
    complete, monitor = whole
    stop, folder = Stop(), tmp_path / "run"
    watcher = Watcher(at=int(0.4 * monitor.total), call=lambda: stop.limit(-1e9))
    study(folder, stop=stop, monitor=watcher)
    cut = resume(folder, budget_seconds=1e-9, monitor=Watcher())
    assert cut.summary["status"] == "budget"
    watcher = Watcher()
    longer = resume(folder, budget_seconds=3600.0, monitor=watcher)
    assert watcher.total == monitor.total
    assert dumps(longer.summary) == dumps(complete.summary)
    kept, wanted = (
        [e for e in timeless(place)[1] if '"end"' not in e] for place in (folder, complete.folder)
    )
    assert kept == wanted
    assert timeless(folder)[0] == timeless(complete.folder)[0]
    ends = read_run(folder).select("end")
    assert [end.get("time") for end in ends] == [
        None,
        {"budget_seconds": 1e-9},
        {"budget_seconds": 3600.0},
    ]


@pytest.mark.parametrize("budget", [0.0, -1.0, math.inf, math.nan])
def test_a_budget_for_the_rest_is_checked(partial, budget):
    before = (partial / "record.jsonl").read_bytes()
    with pytest.raises(InputError, match="Parameter `budget_seconds`"):
        resume(partial, budget_seconds=budget, monitor=Watcher())
    assert (partial / "record.jsonl").read_bytes() == before


def test_the_monitor_knows_when_each_point_is_measured(whole):
    outcome, monitor = whole
    run = read_run(outcome.folder)
    samples = run.header["plan"]["points"]
    assert list(monitor.points) == [f"{n:,} rows" for n in samples]
    assert list(monitor.points.values())[-1] == monitor.total


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_a_damaged_checkpoint_is_trained_again(whole, tmp_path, damage):
    stop, (complete, monitor) = Stop(), whole
    watcher = Watcher(at=int(0.8 * monitor.total), call=lambda: stop.limit(-1e9))
    study(tmp_path / "run", stop=stop, monitor=watcher)
    for path in (tmp_path / "run" / "checkpoints").glob("*.safetensors"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        if damage == "missing":
            path.unlink()
        else:
            path.write_bytes(data[:100] if damage == "truncated" else data)
    watcher = Watcher()
    assert dumps(resume(tmp_path / "run", monitor=watcher).summary) == dumps(complete.summary)
    assert any(stage.startswith("training") for stage in watcher.stages)
    assert watcher.lines == []


def test_a_short_study_recommends_nothing(tmp_path):
    stop = Stop()
    watcher = Watcher(at=300, call=lambda: stop.limit(-1e9))
    advice = study(tmp_path / "run", stop=stop, monitor=watcher).summary["recommendation"]
    assert advice["batch_size"] is None
    assert advice["schedule"] == []
    assert advice["words"][0].startswith("No batch size can be recommended yet")


def test_the_budget_ends_the_study(tmp_path):
    """A step takes 0.01 s here, more than ten times what the plan reckons with."""
    began = time.monotonic()
    outcome = study(tmp_path / "run", "slow", budget=1.5 + START_UP)
    assert outcome.summary["status"] == "budget"
    # No timing is asserted but the bound itself, with all the room that a busy machine needs.
    assert time.monotonic() - began < 30


def change_header(folder, change):
    path = folder / "record.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    header = json.loads(first)
    change(header)
    path.write_text("".join([json.dumps(header) + "\n", *rest]))


@pytest.fixture
def partial(tmp_path):
    stop = Stop()
    study(tmp_path / "run", stop=stop, monitor=Watcher(at=500, call=lambda: stop.limit(-1e9)))
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda h: h["task"].update(spec=tiny("other_data")), "sha256 = '0000"),
        (lambda h: h["settings"].update(batch_size=8), "batch_size = 8 as in the record. Found 4"),
        (lambda h: h["settings"].update(world_size=2), "world_size = 2 .*torchrun"),
        (lambda h: h.update(study="inspect"), "record of `steadygrad advise`. Found 'inspect'"),
        (lambda h: h["settings"].pop("dtype"), "'settings.dtype' to be one of float32.* in line 1"),
    ],
    ids=["data", "batch size", "processes", "study", "settings"],
)
def test_what_must_not_change(partial, change, message):
    change_header(partial, change)
    before = (partial / "record.jsonl").read_bytes()
    with pytest.raises(InputError, match=message):
        resume(partial, monitor=Watcher())
    assert (partial / "record.jsonl").read_bytes() == before


def test_what_may_change_is_told(partial):
    change_header(partial, lambda h: h["environment"].update(torch="1.0"))
    change_header(partial, lambda h: h["settings"].update(threads=64))
    watcher = Watcher()
    resume(partial, monitor=watcher)
    assert [line.split(":")[0] for line in watcher.lines] == [
        f"torch was 1.0 and is {torch.__version__}",
        "the number of threads was 64 and is 1",
    ]


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


def make_engine():
    task = load_task(tiny())
    return Engine(task, seed=0, dtype="float32", ranks=Ranks(Stop()))


def test_evaluating_does_not_disturb_training():
    engine = make_engine()
    engine.seed_everything("before")
    expected = torch.rand(3)
    engine.seed_everything("before")
    first = engine.evaluate()
    assert torch.equal(torch.rand(3), expected)
    assert engine.evaluate() == first
    assert all(module.training for module in engine.model.modules())


def test_a_checkpoint_keeps_every_bit(tmp_path):
    one, two = make_engine(), make_engine()
    order = main_order(4096, 0)
    list(one.run(order, 0, 80, 4))
    tmp_path.joinpath("run").mkdir()
    Checkpoints(tmp_path / "run").save(0, one.state(80))
    two.load(Checkpoints(tmp_path / "run").load(0))
    rest = []
    for trained in (one, two):
        trained.seed_everything("rest")
        rest.append(list(trained.run(order, 80, 160, 4)))
    assert rest[0] == rest[1]
    assert one.steps == two.steps == 40
    for a, b in zip(one.model.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(a, b)
