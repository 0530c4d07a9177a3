"""The compiled trainer against the study's own, on the same plan, seed and data."""

from dataclasses import replace

import pytest
from benchmarks.truth.compiled import CompiledTrainer, header_of, plan_of, run_study
from benchmarks.truth.worlds import WORLDS

from steadygrad.studies.distributed import Deadline, DistributedContext
from steadygrad.studies.trainer import Trainer


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quadratic", "adam-regression"])
def test_every_trial_gives_the_losses_of_torch(name):
    world = replace(WORLDS[name], size=8, horizon=1024)
    plan = plan_of(world, 1024, seeds=4)
    header = header_of(world, 3, plan)
    context = DistributedContext(Deadline())
    trainer = Trainer(world.task(3), seed=3, dtype="float32", context=context)
    work = 16 * plan.samples
    expected = run_study(header, trainer, work)
    found = run_study(header, CompiledTrainer(world, 3), work)
    assert [result.key for result in found] == [result.key for result in expected]
    assert len({result.arm for result in found}) > 1
    for a, b in zip(expected, found, strict=True):
        assert [place for place, _ in a.curve] == [place for place, _ in b.curve]
        # torch's weights are float32, rounded at each of up to 384 steps.
        losses = [[loss for _, loss in result.curve] for result in (a, b)]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
