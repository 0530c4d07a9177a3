"""The worlds of known truth, against training them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.truth import exact
from benchmarks.truth.exact import expected_curve, scratch
from benchmarks.truth.worlds import FAMILIES, train

SMALL = {"size": 6, "horizon": 4 * 1024}
QUADRATIC = replace(FAMILIES["quadratic"], **SMALL, lr=0.05, noise=1.0)
REGRESSION = replace(FAMILIES["regression"], **SMALL, lr=0.05, noise=0.5, scale=2.0)
ADAMS = [replace(FAMILIES[name], **SMALL, lr=0.02) for name in ("adam", "adam-regression")]
EDGE = replace(FAMILIES["edge"], **SMALL)
ALL = [QUADRATIC, REGRESSION, *ADAMS, EDGE]


def rate(world, size):
    power = 1.0 if world.rule == "linear" else 0.5
    return world.lr * (size / world.batch_size) ** power


@pytest.mark.few(1)
@pytest.mark.parametrize("world", ALL, ids=lambda world: world.name)
@pytest.mark.parametrize("size", [4, 12])
def test_training_the_task_has_the_expected_loss(world, size):
    seeds, steps = 30, 30
    expected = expected_curve(world, scratch(world), size, rate(world, size), steps, replicas=8000)
    losses = []
    for seed in range(seeds):
        task = world.task(seed)
        for model, _ in train(task, seed, [size * steps], size, rate(world, size)):
            losses.append(task.evaluate(model, task.valid))
    error = math.hypot(np.std(losses) / seeds**0.5, expected.error[-1])
    # Four standard errors: one such test in 16,000 fails by chance, and the seeds are fixed.
    assert np.mean(losses) == pytest.approx(expected.loss[-1], abs=4 * error)
    assert error < 0.2 * (expected.loss[0] - expected.loss[-1])


@pytest.mark.parametrize(
    ("world", "size", "lr", "steps", "replicas", "deviations", "error"),
    [
        # Batches of 8 are where a regression's features matter most. Five standard errors, because
        # 300 steps are looked at.
        *(
            (world, 8, rate(world, 8), 300, 4000, 5, 0.01)
            for world in (QUADRATIC, REGRESSION, EDGE)
        ),
        # Two weights, two samples and a large rate: every term of the covariance counts.
        (replace(REGRESSION, size=2, noise=0.1, lr=0.25), 2, 0.5, 2, 200_000, 4, 0.02),
    ],
)
def test_the_closed_form_is_what_replicas_do(world, size, lr, steps, replicas, deviations, error):
    closed = expected_curve(world, scratch(world), size, lr, steps)
    batches, rates = np.full(steps, size, dtype=np.int64), np.full(steps, lr)
    drawn = exact._curve(world, scratch(world), batches, rates, replicas, simulate=True)
    # float32 adds a little.
    room = deviations * drawn.error + 1e-5 * closed.loss
    assert np.all(np.abs(drawn.loss - closed.loss) < room)
    assert drawn.error[-1] < error * closed.loss[-1]
