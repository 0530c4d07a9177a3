"""Studies on processes that share every batch: they find what one does, go on, and end together."""

import json
import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Noise, Settings
from steadygrad.studies.compare import schema
from steadygrad.studies.distributed import Deadline, DistributedContext
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import resume, start
from steadygrad.studies.schema import Training as Result
from steadygrad.studies.trainer import Trainer
from tests.distributed import ranks
from tests.unit.studies import framework
from tests.unit.studies.compare import runs as comparisons
from tests.unit.studies.framework import Watcher, lines, part, recorded, tiny, wait_for
from tests.unit.studies.inspect.runs import look, parts_of, spec
from tests.unit.studies.results import SMALL, changed
from tests.unit.studies.test_start import TASK, Training, make_optimizer, plain

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Every exchange between processes waits for the slower one: fewer steps than elsewhere.
ADVISE = changed(SMALL, samples=64)
ALL = comparisons.ALL
COMPARE = comparisons.planned(ALL, samples=16, seeds=5)
SMALLER = comparisons.planned(("adamw", "lans"), samples=64, seeds=4)
STEPS = 16  # of a phase of inspect
CHOSEN = {"device": "cpu", "threads": 1, "workers": 1}


def advise(folder, factory="shared", **options):
    """A study whose task has no dropout, as random numbers differ from rank to rank."""
    framework.begin(Path(folder), factory, **{"at": None, "plan": ADVISE, **options})
    return "done"


def compare(folder, **options):
    options = {"at": None, "plan": COMPARE, "optimizers": ",".join(ALL), **options}
    comparisons.begin(Path(folder), "shared", **options)
    return "done"


def inspect(folder, **options):
    look(Path(folder), spec("residual"), steps=STEPS, **options)
    return "done"


def keep(folder):
    """Keeps a copy of a run."""
    if os.environ["RANK"] == "0":
        shutil.copytree(folder, f"{folder}-alone")
    dist.barrier()


def go_on(folder):
    framework.checked(resume(Path(folder), deadline=Deadline(), monitor=Watcher()))
    return "done"


def apart(folder):
    """A study whose ranks disagree on its name and on when and where it began."""
    own = Path(folder, os.environ["RANK"])
    own.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(own)
        outcome = look(own / "run", spec("residual"), steps=STEPS)
    return str(outcome.folder)


def small(folder, add):
    """A comparison with a plan of its own, for a budget that is too small for any answer."""
    with framework.speed_in_a_moment():
        settings = schema.Settings(
            task=tiny("shared"), add=add, optimizers="muon", budget=4.5, **CHOSEN
        )
        framework.checked(
            start("compare", settings, Path(folder), deadline=Deadline(), monitor=Watcher())
        )


# The study, and after how many samples another run of it is stopped.
STOPPED = {
    "advise-fsdp2": (advise, {"sharding": "fsdp2"}, 900),
    "compare-ddp": (compare, {"plan": SMALLER, "optimizers": "adamw,lans"}, 1300),
    "inspect-ddp": (inspect, {}, 3 * STEPS * 4),
}
# Only whole.
OTHERS = {
    "advise-ddp": (advise, {"sharding": "ddp"}),
    "evaluated-ddp": (advise, {"factory": "evaluated"}),
    "compare-fsdp2": (compare, {"sharding": "fsdp2"}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs of all studies by two processes."""
    folder = tmp_path_factory.mktemp("runs")
    calls = []
    for name, (study, options, *stop) in (STOPPED | OTHERS).items():
        calls.append(partial(study, str(folder / name), **options))
        if stop:
            cut = str(folder / f"{name}-cut")
            calls.append(partial(study, cut, at=stop[0], **options))
            calls += [partial(keep, cut), partial(go_on, cut)]
    for found in ranks.studies(2, calls, folder / "ranks"):
        assert found in (["done"] * 2, [None] * 2)
    return folder


@pytest.mark.parametrize("name", STOPPED)
def test_two_processes_go_on_where_they_stopped(folder, name):
    alone = folder / f"{name}-cut-alone"
    assert read_run(alone).summary["status"] == "budget"
    whole = lines(folder / name)
    assert 1 < len(lines(alone)) < len(whole)
    assert lines(folder / f"{name}-cut") == whole
    with pytest.raises(InputError, match="world_size"):
        part(alone, 1)


def numbers(run):
    """Losses, and the parts of the noise scales."""
    points = [point for noise in run.results.select(Noise) for point in noise.points]
    trainings = [one for one in run.results if one.key[0] == "training"]
    losses = [loss for one in trainings for _, loss in one.curve]
    return losses + [x for point in points for x in (point.grad_sq_norm, point.noise_trace)]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    advise(folder / "advise")
    compare(folder / "compare")
    return folder


@pytest.mark.parametrize("name", ["advise-ddp", "advise-fsdp2", "evaluated-ddp"])
def test_two_processes_advise_what_one_does(one, folder, name):
    single, shared = read_run(one / "advise"), read_run(folder / name)
    runtime = shared.header.runtime
    assert (runtime.world_size, runtime.sharding) == (2, name.partition("-")[2])
    assert [event.key for event in shared.results] == [event.key for event in single.results]
    found = [numbers(run) for run in (single, shared)]
    # float32 sums in another order, over 16 steps; a rank's samples lost or seen twice show in the
    # second digit.
    assert found[1] == pytest.approx(found[0], rel=1e-5)
    one_size, size = (run.summary["recommendation"]["batch_size"] for run in (single, shared))
    assert size == one_size


def test_two_processes_compare_as_one_does(one, folder):
    single, shared = read_run(one / "compare"), read_run(folder / "compare-fsdp2")
    runs = {run.key: run for run in single.results.select(Result) if run.step in (-1, 0, 1)}
    # At least the search; the rates that it finds may differ.
    assert len(runs) >= 6 * len(ALL)
    pairs = [(runs[run.key], run) for run in shared.results.select(Result) if run.key in runs]
    assert len(pairs) >= 6 * len(ALL)
    for own, other in pairs:
        # Sums in another order over at most 16 steps; Muon orthogonalises in bfloat16, whose
        # rounding is 2^-8. A rank's samples lost or seen twice show in the first digit.
        near = 2e-2 if ALL[own.arm] == "muon" else 1e-4
        assert other.loss == pytest.approx(own.loss, rel=near), own.key


def test_an_overflow_on_one_process_is_attributed_on_all(folder):
    run = read_run(folder / "inspect-ddp")
    after = parts_of(run.folder, "after")
    skipped = sum(part.skipped for part in after)
    (effect,) = (x for x in run.summary["findings"] if x.get("name") == "nonfinite_at_any_scale")
    assert effect["layers"] == {"blocks.1": skipped}
    # Both processes' gradients are counted, and of each only finite steps.
    counts = [part.weights["last"] for part in after if "last" in part.weights]
    total = sum(h.zero + sum(h.counts) for h in counts)
    assert total == 2 * 17 * (STEPS - skipped)


def test_all_processes_take_the_first_ones_folder(folder, tmp_path):
    [[first, second]] = ranks.studies(2, [partial(apart, str(tmp_path))], tmp_path / "ranks")
    assert first == second
    assert first == str(tmp_path / "0" / "run")
    assert lines(Path(first)) == lines(folder / "inspect-ddp")


def test_what_cannot_be_used_ends_all_processes(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "notes.txt").write_text("mine")
    run = str(tmp_path / "run")
    refused = {
        # Only the first rank can see it.
        "empty folder": partial(advise, str(mine)),
        "it broke": partial(small, run, f"{comparisons.ADDED}:raises"),
        "no_step": partial(small, run, f"{comparisons.ADDED}:no_step"),
        "budget": partial(small, run, ""),
    }
    found = ranks.studies(2, list(refused.values()), tmp_path / "two")
    found += ranks.studies(3, [partial(advise, run, "make_task")], tmp_path / "three")
    for message, said in zip([*refused, "batch_size"], found, strict=True):
        assert said == said[:1] * len(said)
        assert message in said[0]
    assert not Path(run).exists()


def slow_study(folder):
    """What ended a study that takes its time."""
    deadline, settings = Deadline(), Settings(task=tiny("slow"), budget=1e6, **CHOSEN)
    with framework.planned(ADVISE), deadline.signals():
        found = start("advise", settings, Path(folder), deadline=deadline, monitor=Watcher())
    return framework.checked(found).stopped_by


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_a_signal_to_one_process_ends_both(tmp_path, sent):
    folder, place = tmp_path / "run", tmp_path / "ranks"
    context = ranks.start_studies(2, [partial(slow_study, str(folder))], place)
    wait_for(lambda: recorded(folder) > 0)
    os.kill(context.pids()[1], sent)
    if sent is signal.SIGINT:
        ranks.join(context, seconds=200)
        assert ranks.results_of(2, place) == [[sent], [sent]]
        assert read_run(folder).summary["status"] == "interrupted"
        return
    with pytest.raises((mp.ProcessExitedException, mp.ProcessRaisedException)):
        ranks.join(context, seconds=90)  # a minute is the exchange's limit
    # The launcher's signal may reach the rank that is left before it misses the other one, and an
    # exchange in a backward pass that misses it is an error of the trial.
    result = place / "result-0.json"
    [ended] = json.loads(result.read_text()) if result.exists() else [signal.SIGTERM]
    assert ended == signal.SIGTERM or "Found RuntimeError" in ended


def write_training(path):
    """A checkpoint of the training, its optimizer's state sharded as well."""
    training, sharded = Training(), Training()
    state = training.optimizer.state_dict()
    model = fully_shard(sharded.model)
    optimizer = torch.optim.AdamW(model.parameters())
    for p, own in zip(model.parameters(), state["state"].values(), strict=True):
        optimizer.state[p] = {
            name: x if name == "step" else distribute_tensor(x, p.device_mesh, p.placements)
            for name, x in own.items()
        }
    optimizer.param_groups[0].update(eps=1e-3)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def trained_on(path, sharding="ddp"):
    """Weights after three steps from the checkpoint."""
    task = replace(TASK, start=path, make_optimizer=make_optimizer)
    device = torch.device("cpu")
    with DistributedContext.joined(Deadline(), device, sharding) as context:
        trainer = Trainer(task, seed=0, dtype="float32", context=context)
        trainer.check_task()
        for number in range(10, 13):
            trainer.step(torch.arange(4 * number, 4 * number + 4))
        weights, _ = context.states(trainer.model, trainer.optimizer)
        return torch.cat([x.flatten() for x in weights.values()]).tolist()


def test_a_task_starts_from_a_file_or_from_a_folder_of_two_processes(tmp_path):
    file, folder = str(tmp_path / "file"), str(tmp_path / "folder")
    plain(Training(), tmp_path / "file")
    one = trained_on(file)
    calls = [partial(write_training, folder)]
    for path in (file, folder):
        calls += [partial(trained_on, path, sharding) for sharding in ("ddp", "fsdp2")]
    for found in ranks.studies(2, calls, tmp_path / "ranks")[1:]:
        for weights in found:
            # float32 sums in another order, over three steps.
            assert weights == pytest.approx(one, abs=1e-6)
