"""A study that was killed, stopped or given more time, against one that was not."""

import json
import math
import signal
from importlib.metadata import version

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.record import dumps, read_run
from steadygrad.studies.advise import Stop, resume
from steadygrad.studies.checkpoint import Checkpoints
from steadygrad.studies.order import main_order
from tests.unit.studies.helpers import Watcher, make_engine, study, timeless, tiny


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
        (lambda h: h["task"].update(parameters=7), "a model of 7 parameters as in the record"),
        (lambda h: h["settings"].update(world_size=2), "world_size = 2 .*torchrun"),
        (lambda h: h.update(study="inspect"), "record of `steadygrad advise`. Found 'inspect'"),
        (lambda h: h["settings"].pop("dtype"), "'settings.dtype' to be one of float32.* in line 1"),
    ],
    ids=["data", "batch size", "model", "processes", "study", "settings"],
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
        f"torch was 1.0 and is {version('torch')}",
        "the number of threads was 64 and is 1",
    ]


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
