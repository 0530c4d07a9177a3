"""The worlds of known truth, against training them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.truth import exact
from benchmarks.truth.exact import (
    critical_batch,
    expected_curve,
    from_scratch_overhead,
    overhead,
    scratch,
    start_of,
)
from benchmarks.truth.worlds import FAMILIES, train

SMALL = {"size": 6, "horizon": 4 * 1024}
QUADRATIC = replace(FAMILIES["quadratic"], **SMALL, lr=0.05, noise=1.0)
REGRESSION = replace(FAMILIES["regression"], **SMALL, lr=0.05, noise=0.5, scale=2.0)
ADAM = replace(FAMILIES["adam"], **SMALL, lr=0.02)
ADAM_REGRESSION = replace(FAMILIES["adam-regression"], **SMALL, lr=0.02)
EDGE = replace(FAMILIES["edge"], **SMALL)
ALL = [QUADRATIC, REGRESSION, ADAM, ADAM_REGRESSION, EDGE]


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


@pytest.mark.parametrize("world", [QUADRATIC, ADAM], ids=lambda world: world.name)
def test_without_noise_a_replica_is_the_task(world):
    still = replace(world, noise=1e-12)
    task = still.task(0)
    begun, ended = (
        (start_of(model, optimizer), task.evaluate(model, task.valid))
        for model, optimizer in train(task, 0, [4 * 20, 4 * 50])
    )
    curve = expected_curve(still, begun[0], 4, still.lr, 30, replicas=2)
    assert curve.loss[0] == pytest.approx(begun[1], rel=1e-6)
    # float32, over 30 steps.
    assert curve.loss[-1] == pytest.approx(ended[1], rel=1e-4)
    assert ended[1] < 0.9 * begun[1]


@pytest.mark.parametrize("world", [QUADRATIC, EDGE], ids=lambda world: world.name)
def test_the_edge_of_stability_is_where_the_rate_times_the_curvature_is_two(world):
    multiple = 2 / (world.lr * world.curvatures.max())
    below, above = (round(4 * multiple * part) for part in (0.97, 1.03))
    start = scratch(world)
    assert expected_curve(world, start, below, rate(world, below), 3000).loss[-1] < 100
    assert expected_curve(world, start, above, rate(world, above), 3000).loss[-1] > 1e6
    # Just past it a short branch still ends at a finite loss, and one that counts as diverged.
    assert math.isfinite(expected_curve(world, start, above, rate(world, above), 20).loss[-1])
    assert math.isinf(overhead(world, start, above, 3000 * above))


@pytest.mark.parametrize("world", [QUADRATIC, REGRESSION], ids=lambda world: world.name)
def test_the_critical_batch_is_what_trying_every_size_finds(world):
    start, length = scratch(world), 1024
    found = critical_batch(world, start, length)
    raw = {size: overhead(world, start, size, length) for size in range(4, 257)}
    best = found.best
    relative = {size: (1 + extra) / (1 + raw[best]) - 1 for size, extra in raw.items()}
    first = next(size for size in raw if size > best and relative[size] > 0.2)
    assert first - 1 <= found.value <= first
    assert found.overheads[best] == 0
    assert found.overheads[first] == pytest.approx(relative[first])
    assert found.error == 0


def test_a_schedule_of_one_size_is_that_size_and_warming_up_costs():
    n, size = QUADRATIC.horizon, 16
    alone = from_scratch_overhead(QUADRATIC, size, n)
    lr = rate(QUADRATIC, size)
    assert from_scratch_overhead(QUADRATIC, [(0, size, lr)], n) == alone
    assert from_scratch_overhead(QUADRATIC, [(0, size, lr), (n // 2, size, lr)], n) == alone
    assert from_scratch_overhead(QUADRATIC, 4, n) == pytest.approx(0, abs=1e-9)
    assert from_scratch_overhead(QUADRATIC, [(0, 4, 0.0)], n) == math.inf
    # A mean over two places of a bent curve is above the loss at their mean place.
    steps = np.full(n // 4, 4), np.full(n // 4, QUADRATIC.lr)
    for marks in ((), (n // 2, n)):
        found = exact.steps_overhead(QUADRATIC, *steps, n, marks=marks)
        assert found == pytest.approx(0, abs=1e-6)


def test_noisy_curves_are_read_by_their_trend():
    samples = np.arange(4001.0)
    noise = np.random.default_rng(0).normal(size=4001) * 0.01
    loss, ones = 2 - samples / 4000 + noise, np.ones(4001)
    noisy = exact.Curve(samples, loss, 0.01 * ones, ones)
    # The lowest loss so far is about three deviations, 120 samples, ahead.
    assert noisy.samples_at(1.5) == pytest.approx(2000, abs=20)
    exactly = exact.Curve(samples, loss - noise, 0 * ones, 0 * ones)
    assert exactly.samples_at(1.50003) == pytest.approx(1999.88)
    assert exactly.samples_at(3.0) == 0
    assert exactly.samples_at(0.5) == math.inf
