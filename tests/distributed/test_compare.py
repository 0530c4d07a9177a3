"""``compare`` on two processes that share every batch, with DDP and with FSDP2."""

from pathlib import Path

import pytest

from steadygrad._checks import InputError
from steadygrad.studies.compare.schema import Run, Settings, Speed
from steadygrad.studies.folder import read_run
from steadygrad.studies.run import start as begin_study
from tests.distributed.test_advise import on_ranks, resumed
from tests.unit.studies.compare.runs import ADDED, ALL, begin, planned
from tests.unit.studies.framework import Watcher, copy, lines, part, tiny

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

# Two processes wait for each other at every step: fewer than elsewhere.
SHORT = planned(optimizers=ALL, horizons=(16, 32, 64), seeds=2, full=False)


def study(folder, **options):
    """A study of all optimizers; its task has no dropout, as random numbers differ by rank."""
    begin(Path(folder), "shared", at=-1, plan=SHORT, optimizers=",".join(ALL), **options)
    return "done"


def stopped(folder, at):
    begin(Path(folder), "shared", at=at, plan=SHORT, optimizers=",".join(ALL))
    return "done"


def small(folder, add):
    """A study with a plan of its own, for a budget that is too small for any answer."""
    chosen = {"device": "cpu", "threads": 1, "workers": 1, "optimizers": "muon", "budget": 4.5}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("steadygrad.studies.calibration.SECONDS", 0.01)
        settings = Settings(task=tiny("shared"), add=add, **chosen)
        begin_study("compare", settings, Path(folder), monitor=Watcher())


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    folder = tmp_path_factory.mktemp("one") / "run"
    study(folder)
    return folder


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
def test_two_processes_find_what_one_does(one, tmp_path, sharding):
    folder = tmp_path / "two"
    found = on_ranks(tmp_path / "ranks", 2, study, str(folder), sharding=sharding)
    assert found == ["done", "done"]
    single, shared = read_run(one), read_run(folder)
    assert (shared.header.runtime.world_size, shared.header.runtime.sharding) == (2, sharding)
    runs = {run.key: run for run in single.select(Run)}
    searched = {key for key, run in runs.items() if not run.repeat and run.samples == 16}
    assert len(searched) >= 5 * len(ALL)
    pairs = [(runs[run.key], run) for run in shared.select(Run) if run.key in runs]
    assert {own.key for own, _ in pairs} >= searched
    for own, other in pairs:
        # Sums in another order over at most 16 steps; Muon orthogonalises in bfloat16, whose
        # rounding is 2^-8. A rank's samples lost or seen twice show in the first digit.
        near = 2e-2 if own.optimizer == "muon" else 1e-4
        assert other.loss == pytest.approx(own.loss, rel=near), own.key
    speeds = [run.select(Speed)[0].state_bytes for run in (single, shared)]
    assert speeds[1] == pytest.approx(speeds[0], rel=1e-6)


def test_two_processes_go_on_where_they_stopped(tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert on_ranks(tmp_path / "a", 2, study, str(whole)) == ["done", "done"]
    assert on_ranks(tmp_path / "b", 2, stopped, str(cut), 4000) == ["done", "done"]
    assert read_run(cut).summary["status"] == "budget"
    assert 10 < len(lines(cut)) < len(lines(whole))
    alone = copy(cut, tmp_path / "alone")
    assert on_ranks(tmp_path / "c", 2, resumed, str(cut)) == ["done", "done"]
    assert lines(cut) == lines(whole)
    with pytest.raises(InputError, match="world_size"):
        part(alone, 1)


@pytest.mark.parametrize(
    ("add", "message"),
    [
        (f"{ADDED}:raises", "it broke"),
        (f"{ADDED}:no_step", "no_step"),
        ("", "budget"),
    ],
)
def test_what_cannot_be_used_ends_all_processes(tmp_path, add, message):
    found = on_ranks(tmp_path / "ranks", 2, small, str(tmp_path / "run"), add)
    assert found[0] == found[1]
    assert message in found[0]
    assert not (tmp_path / "run").exists()
