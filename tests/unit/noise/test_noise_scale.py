"""`NoiseScale` on one step against the definitions, what it refuses, and its history."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.noise.estimate import empty_ring, estimate_from, push, skipped_in
from tests.contracts.problems import hooks_of
from tests.rounding import assert_close
from tests.unit.noise.training_loop import (
    COUNTS,
    Preconditioned,
    Shared,
    accumulate,
    assert_defined,
    course_of,
    found,
    histories,
    last,
    left_out,
    losses,
    make,
    measure,
    per_sample,
    run,
    synthetic,
)

SOURCES = pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])


# What `accumulation` says of the micro-batches' weights.
ACCUMULATIONS = {"mean": [1 / 3] * 3, "sum": [1.0] * 3, "samples": [n / 10 for n in COUNTS]}


@pytest.mark.parametrize("source", ["microbatch", "accumulated"])
@pytest.mark.parametrize(("accumulation", "weights"), ACCUMULATIONS.items())
def test_unequal_micro_batches(accumulation, weights, source):
    model, x, y = make()
    noise = NoiseScale(model, source=source, accumulation=accumulation)
    measure(noise, model, x, y, weights=weights)
    assert_defined(noise.estimate(), per_sample(model, x, y), COUNTS, weights)


def test_explicit_weights():
    model, x, y = make()
    noise, weights = NoiseScale(model), [0.4, 1.0, 0.6]
    for a, b, weight in zip(x.split(COUNTS), y.split(COUNTS), weights, strict=True):
        accumulate(model, a, b, noise, counts=[len(a)], weights=[weight], weight=weight)
    noise.step()
    assert_defined(noise.estimate(), per_sample(model, x, y), COUNTS, weights)


@pytest.mark.parametrize("counts", [[10], COUNTS], ids=str)
def test_single_examples_as_parts(counts):
    model, x, y = make()
    noise = NoiseScale(model, source="per_example", accumulation="samples")
    measure(noise, model, x, y, counts, weights=[n / 10 for n in counts])
    assert_defined(noise.estimate(), per_sample(model, x, y), [1] * 10)


def test_reentrant_checkpoint_of_a_reused_layer_is_refused_by_name():
    model, x, y = make(model=partial(Shared, True))
    with pytest.raises(InputError, match=r"twice\.weight"):
        measure(NoiseScale(model), model, x, y)


@SOURCES
def test_loss_scale_changes_nothing(source):
    model, x, y = make()
    plain, scaled = NoiseScale(model, source=source), NoiseScale(model, source=source)
    measure(plain, model, x, y, [5, 5])
    measure(scaled, model, x, y, [5, 5], scale=2.0**16, loss_scale=2.0**16)
    # Powers of two scale exactly.
    assert last(scaled) == last(plain)


def test_half_precision_gradients_are_measured_in_float32():
    model, x, y = make()
    half = copy.deepcopy(model).to(torch.float16)
    exact, rough = NoiseScale(model), NoiseScale(half)
    # Squares of these gradients overflow float16: their norms are far above 256.
    measure(exact, model, x, y, [5, 5], scale=300.0, loss_scale=300.0)
    measure(rough, half, x.half(), y.half(), [5, 5], scale=300.0, loss_scale=300.0)
    # 2 %: float16 has 11 bits, and noise is a difference of squares.
    assert last(rough) == pytest.approx(last(exact), rel=0.02)


def test_groups_are_measured_and_frozen_weights_are_not():
    """The groups add up to the whole; an unused parameter counts as nothing."""
    layers = nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Module()
    layers[0].weight.requires_grad_(False)
    layers[3].unused, layers[3].forward = nn.Parameter(torch.ones(3)), lambda x: x
    model, x, y = make(model=lambda: nn.Sequential(*layers))
    noise = NoiseScale(model, groups=lambda name: name.rpartition(".")[2])
    measure(noise, model, x, y)
    whole = noise.estimate()
    assert whole.by_group.pop("unused").noise_trace == 0
    for group, estimate in [("", whole), *whole.by_group.items()]:
        wanted = lambda name, group=group: group in name and name not in ("0.weight", "3.unused")
        assert_defined(estimate, per_sample(model, x, y, wanted=wanted), COUNTS, rel=1e-10)
    assert {*whole.by_group} == {"weight", "bias"}


def preconditioner(model, optimizer):
    """The root of the second moment plus eps of every parameter, flat, from the definitions."""
    rows, group = [], optimizer.param_groups[0]
    for p in model.parameters():
        state = optimizer.state[p]
        names = ("max_exp_avg_sq", "exp_avg_sq", "square_avg")
        second = next(state[name] for name in names if name in state)
        if "betas" in group:
            second = second / (1 - group["betas"][1] ** state["step"].item())
        rows.append((second.sqrt() + group["eps"]).flatten())
    return torch.cat(rows)


OPTIMIZERS = {
    # 1e-7: Adam counts its steps in float32, and so the bias correction has seven digits.
    "adam": (torch.optim.Adam, {}, 1e-7),
    "amsgrad": (torch.optim.Adam, {"amsgrad": True}, 1e-7),
    "rmsprop": (torch.optim.RMSprop, {}, 1e-9),
}


@pytest.mark.parametrize(
    ("name", "source"),
    [*((name, "microbatch") for name in OPTIMIZERS), ("adam", "accumulated")],
)
def test_preconditioned_by_the_second_moment_before_the_step(name, source):
    """State and options are those that a load brought; torch's makes new groups."""
    kind, options, rel = OPTIMIZERS[name]
    model, x, y = make()
    saved = kind(model.parameters(), lr=1e-3, **options)
    # The largest second moment is not the last one.
    for factor in (10, 10, 0.1, 0.1):
        saved.zero_grad()
        losses(model, x * factor, y).mean().backward()
        saved.step()
    optimizer = kind(model.parameters(), eps=1e-3)
    noise = NoiseScale(model, source=source, metric="preconditioned", optimizer=optimizer)
    optimizer.load_state_dict(saved.state_dict())
    measure(noise, model, x, y)
    rows = per_sample(model, x, y) / preconditioner(model, saved).sqrt()
    assert_defined(noise.estimate(), rows, COUNTS, rel=rel)


@pytest.mark.parametrize(
    "how",
    [
        {"betas": (0.9, 0.99, 0.999), "step": 1},
        {"betas": (0.9, 0.999)},
        {"betas": (0.9, 0.999), "step": 1, "exp_avg_sq": torch.ones(2, 2)},
        {"exp_avg_sq": None, "momentum_buffer": 1},
    ],
    ids=["three betas", "no step", "another shape", "none"],
)
def test_a_second_moment_of_another_kind_is_refused(how):
    model, x, y = make()
    optimizer = Preconditioned(model, **how)
    with pytest.raises(InputError, match="optimizer"):
        measure(NoiseScale(model, metric="preconditioned", optimizer=optimizer), model, x, y)


def test_nothing_is_measured_before_the_optimizer_has_state():
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    measure(noise, model, x, y, [5, 5])
    assert (noise.estimate().measurements.item(), left_out(noise)) == (0, (1, 0))
    optimizer.step()
    measure(noise, model, x, y, [5, 5])
    assert noise.estimate().measurements.item() == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "microbatches"}, "source"),
        ({"decay": 0.0}, "decay"),
        ({"metric": "l1"}, "metric"),
        ({"metric": "preconditioned"}, "optimizer"),
        ({"accumulation": "none"}, "accumulation"),
        ({"metric": "preconditioned", "source": "per_example"}, "source"),
        ({"groups": {"weight": "all"}}, "groups"),
        ({"drift": "yes"}, "drift"),
        ({"samples": 0}, "samples"),
        ({"samples": "4"}, "samples"),
        ({"model": [nn.Linear(2, 2)]}, "`model`"),
        ({"model": nn.Linear(2, 2, device="meta")}, "`model`"),
        ({"model": nn.Linear(2, 2).requires_grad_(False)}, "`model`"),
    ],
)
def test_bad_arguments(options, message):
    arguments = {"model": nn.Linear(2, 2), **options}
    with pytest.raises(InputError, match=message):
        NoiseScale(**arguments)
    assert not any(hooks_of(m) for m in [arguments["model"]] if isinstance(m, nn.Module))


@pytest.mark.parametrize("every", [1, 2])
def test_resumes_to_the_bit(every):
    model, x, y = make()
    straight, first = NoiseScale(model, every=every), NoiseScale(model, every=every)
    for i in range(8):
        measure(straight, model, x * (1 + i), y, [5, 5])
    for i in range(3):
        measure(first, model, x * (1 + i), y, [5, 5])
    second = NoiseScale(model, every=every)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for i in range(3, 8):
        measure(second, model, x * (1 + i), y, [5, 5])
    assert str(second.estimate().as_dict()) == str(straight.estimate().as_dict())


def test_a_state_of_another_model_is_refused():
    with pytest.raises(InputError, match="state_dict"):
        NoiseScale(nn.Linear(2, 2)).load_state_dict(NoiseScale(make()[0]).state_dict())


@pytest.mark.few(1)
@SOURCES
def test_finds_a_known_noise_scale_at_any_batch_size(source):
    model, sample = synthetic(40.0)
    noise = NoiseScale(model, decay=1.0, source=source)
    run(noise, model, sample, 150, [2] * 4)
    run(noise, model, sample, 150, [16] * 8)
    got = noise.estimate()
    # 12 and 3 %: three standard errors.
    assert got.value.item() == pytest.approx(40, rel=0.12)
    assert got.noise_trace.item() == pytest.approx(40, rel=0.03)
    assert got.low.item() < 40 < got.high.item()
    assert got.resolved.item()


def test_history_keeps_the_newest():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=0.2)
    run(noise, model, lambda n: sample(n) * 1e4, 4, [4, 4])
    run(noise, model, sample, 6, [4, 4])
    got = noise.estimate()
    assert got.measurements.item() == 6
    assert got.noise_trace.item() < 100  # nothing of the huge gradients is left
    noise.reset()
    assert noise.estimate().measurements.item() == 0


def test_decay_forgets_as_it_says():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=0.5)
    run(noise, model, sample, 2, [4, 4])
    first, second = found(noise)[:2, 1].sum(-1).tolist()
    assert last(noise)[1] == pytest.approx((0.5 * first + second) / 1.5, rel=1e-12)


@pytest.mark.parametrize("source", ["found", "microbatch", "per_example", "accumulated"])
def test_every_third_step_is_measured(source):
    options = {"samples": 5} if source == "found" else {"source": source}
    measured = []
    for every, steps in ((3, range(7)), (1, range(0, 7, 3))):
        model, x, y = make()
        noise = NoiseScale(model, every=every, **options)
        for i in steps:
            model.zero_grad()
            accumulate(model, x * (1 + i), y, None if source == "found" else noise)
            noise.step()
        assert noise.estimate().measurements.item() == 3
        measured.append(found(noise))
    assert torch.equal(*measured)


def test_an_overflowed_step_is_left_out_and_counted():
    model, x, y = make()
    noise = NoiseScale(model)
    measure(noise, model, x, y)
    before = noise.estimate().as_dict()
    x[0, 0] = torch.inf
    model.zero_grad()
    accumulate(model, x, y, noise)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # which is then no alteration
    noise.step()
    selected = pytest.approx(1 / 1.99)
    expected = {**before, "age": 1.0, "skipped": 1, "selected": selected}
    # The one measurement's weight, 0.99 now, is divided out again: a rounding where numbers cancel.
    assert_close(noise.estimate().as_dict(), expected, rel=1e-12)
    assert (before["measurements"], left_out(noise)) == (1, (1, 0))


def test_while_it_drifts_the_estimate_is_of_the_newest_measurements():
    """Of each group by itself, and never with `drift=False`, whose states are the same."""
    groups = "none", "exponential"
    series = [histories(course_of(g, 250, 100), 2.0, 1, seed=5) for g in groups]
    noises, signals = (torch.cat(rows).flip(-1) for rows in zip(*series, strict=True))
    ring, count = empty_ring(689, 2, torch.device("cpu"))
    for t in range(250):
        push(ring, count, (signals[:, t], noises[:, t]))
    model = nn.ModuleDict({group: nn.Linear(2, 1, bias=False) for group in groups})
    found = []
    for drift in (True, False):
        noise = NoiseScale(model, drift=drift)
        noise.load_state_dict({**noise.state_dict(), "ring": ring, "pushed": count})
        found.append(noise.estimate().by_group)
    got, whole = found
    assert [group.drifting.item() for group in got.values()] == [False, True]
    assert all(group.low < 128 < group.high for group in got.values())
    # The most measurements: a quarter of a half, as the whole is known to drift.
    assert got["exponential"].measurements <= 250 / 8
    assert [group.measurements for group in whole.values()] == [250, 250]
    assert whole["exponential"].value < 90  # the average's


def test_nothing_waits_for_the_device():
    """On a device without memory any read of a value raises."""
    kept = empty_ring(64, 2, torch.device("meta"))
    for _ in range(40):
        push(*kept, torch.zeros(2, 2, device="meta").unbind())
    for drift in (True, False):
        facts = {"altered": skipped_in(*kept)}
        got = estimate_from(*kept, 0.99, 0.95, groups=["a", "b"], drift=drift, **facts)
        for each in (got, *got.by_group.values()):
            numbers = [x for x in vars(each).values() if isinstance(x, torch.Tensor)]
            assert {(x.device.type, x.shape) for x in numbers} == {("meta", ())}


def test_batch_norm_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        NoiseScale(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoiseScale(model.eval())
