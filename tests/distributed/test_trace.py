"""Traces of several processes: faults are found, and without one they are those of one process."""

from functools import partial

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from steadygrad.trace.diff import compare
from steadygrad.trace.runs import read_run
from steadygrad.trace.words import summary
from tests.distributed.ranks import on_ranks
from tests.distributed.training import shard
from tests.unit.trace.faults import FAULTS, SEVERAL, Right, run, setting

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

SETTINGS = [*dict.fromkeys(map(setting, FAULTS.values()))]
PAIRS = [(kind, name) for name, wrong in FAULTS.items() for kind in SEVERAL if kind in wrong.kinds]
COMPARED = [
    (kind, name, other)
    for kind, name in PAIRS
    for other in ([kind, "single"] if FAULTS[name].as_single else [kind])
]


class Micros(Right):
    right, micros = Right, 2


def wrap(kind, model, loop):
    if kind == "ddp":
        return DistributedDataParallel(model)
    return shard(model, *model.blocks, **loop.shard_options)


def right_path(folder, kind, wrong):
    return folder / f"{kind}-right-{SETTINGS.index(setting(wrong))}"


def faults(rank, world, folder):
    for kind in SEVERAL:
        options = {"wrap": partial(wrap, kind), "rank": rank, "world": world}
        for wrong in {setting(w): w for w in FAULTS.values() if kind in w.kinds}.values():
            run(right_path(folder, kind, wrong), wrong, wrong.right, steps=3, **options)
        for name, wrong in FAULTS.items():
            if kind in wrong.kinds:
                steps = wrong.truth[0] + 1
                run(folder / f"{kind} {name}", wrong, steps=steps, **options)
    plain(rank, world, folder)


def plain(rank, world, folder):
    for kind in SEVERAL:
        for loop in (Right, Micros):
            path = folder / f"{kind}-{world}-{loop.__name__}"
            run(path, loop, wrap=partial(wrap, kind), rank=rank, world=world)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Traces of all runs."""
    path, threads = tmp_path_factory.mktemp("traces"), torch.get_num_threads()
    torch.set_num_threads(1)
    on_ranks(2, faults, path / "two", path)
    on_ranks(4, plain, path / "four", path)
    for wrong in {setting(w): w for w in FAULTS.values() if w.as_single}.values():
        run(right_path(path, "single", wrong), wrong, wrong.right)
    for loop in (Right, Micros):
        run(path / f"single-{loop.__name__}", loop)
    torch.set_num_threads(threads)
    return path


@pytest.mark.parametrize(("kind", "name", "other"), COMPARED)
def test_fault(kind, name, other, folder):
    wrong = FAULTS[name]
    a, b = right_path(folder, other, wrong), folder / f"{kind} {name}"
    said = summary(compare(read_run(a), read_run(b)))
    expected = ["unknown" if wrong.unknown else "part", *wrong.truth]
    assert [said[k] for k in ("verdict", "step", "stage", "module")] == expected, said["answer"]


@pytest.mark.parametrize("loop", [Right, Micros])
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", SEVERAL)
def test_no_fault(kind, world, loop, folder):
    a, b = folder / f"single-{loop.__name__}", folder / f"{kind}-{world}-{loop.__name__}"
    found = compare(read_run(a), read_run(b))
    assert found.verdict == "same", summary(found)["answer"]


@pytest.mark.parametrize("kind", SEVERAL)
def test_other_micro_batches(kind, folder):
    a, b = folder / "single-Right", folder / f"{kind}-2-Micros"
    found = compare(read_run(a), read_run(b))
    assert found.verdict == "same", summary(found)["answer"]
