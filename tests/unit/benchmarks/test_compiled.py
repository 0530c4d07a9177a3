"""The compiled trainer against the study's own, on the same plan, seed and data."""

from dataclasses import replace

import pytest
from benchmarks.truth.compiled import CompiledTrainer, header_of, run_study
from benchmarks.truth.worlds import WORLDS

from steadygrad.studies.advise.plan import plan_of_length
from steadygrad.studies.advise.schema import Branch, Point, Scratch
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.trainer import Trainer


@pytest.mark.parametrize("name", ["quadratic", "adam-regression"])
def test_every_trial_gives_the_losses_of_torch(name):
    world = replace(WORLDS[name], size=8, horizon=1024)
    plan = plan_of_length(1024, (2, 2, 2), 4, 4096, speed=1000.0)
    header = header_of(world, 3, plan)
    context = DistributedContext(Deadline())
    trainer = Trainer(world.task(3), seed=3, dtype="float32", context=context)
    expected, _ = run_study(header, trainer)
    found, _ = run_study(header, CompiledTrainer(world, 3))
    keys = [event.key for event in expected]
    assert [event.key for event in found] == keys
    assert {type(event) for event in found} == {Point, Branch, Scratch}
    for a, b in zip(expected, found, strict=True):
        losses = [[loss for _, loss in event.curve] for event in (a, b)]
        assert [place for place, _ in a.curve] == [place for place, _ in b.curve]
        # torch's weights are float32, rounded at each of up to 384 steps.
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
