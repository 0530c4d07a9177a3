"""Expected losses over any length are those of the closed forms, and of trainings."""

import numpy as np
import pytest
from benchmarks.truth import exact
from benchmarks.truth.lengths import FreshTrainer, Lengths, LongWorld, curve_of

from steadygrad.studies.course import Order, Rate

COMMON = {"name": "w", "optimizer": "sgd", "lr": 0.1, "noise": 1.0, "size": 8, "horizon": 512}


@pytest.mark.parametrize("kind", ["quadratic", "regression"])
def test_are_those_of_the_closed_forms(kind):
    world = LongWorld(kind=kind, **COMMON)
    known = exact.expected_curve(world, exact.scratch(world), 4, world.lr, 128)
    np.testing.assert_allclose(curve_of(world, 4, 512, 0), known.loss, rtol=1e-12)


@pytest.mark.parametrize("kind", ["quadratic", "regression"])
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("decays", [False, True])
def test_are_those_of_trainings(kind, normalized, decays):
    optimizer = "adam" if normalized else "sgd"
    given = COMMON | {"optimizer": optimizer, "normalized": normalized, "decays": decays}
    world = LongWorld(kind=kind, **given)
    trainer, rate = FreshTrainer(world, 0), Rate(16, 1.0, 32, 512, 0.0)
    losses = []
    for seed in range(200):
        trainer.restart(seed)
        for _ in trainer.run(Order(512, 0), 0, 512, 16, rate=rate):
            pass
        losses.append(trainer.evaluate())
    error = np.std(losses) / np.sqrt(len(losses))
    assert abs(np.mean(losses) - curve_of(world, 16, 512, 0)[-1]) < 4 * error


def test_critical_size_is_between_two():
    found = Lengths(64, tuned={4: 0.0, 8: 0.1, 16: 0.3}, ruled={4: 0.0, 8: 0.1})
    assert found.critical() == pytest.approx(8 * 2**0.5)
    assert found.critical(by_rule=True) == np.inf
    assert found.at(64) == 0.3
