"""`NoiseScale` on one step against the definitions, and what it refuses."""

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.unit.noise.training_loop import (
    COUNTS,
    Preconditioned,
    Shared,
    accumulate,
    assert_defined,
    last,
    left_out,
    losses,
    make,
    measure,
    per_sample,
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


@pytest.mark.parametrize(
    ("source", "reentrant"),
    [
        *((source, how) for source in ("microbatch", "per_example") for how in (None, False)),
        ("accumulated", True),
    ],
)
def test_shared_weights_and_checkpointing(source, reentrant):
    model, x, y = make(model=partial(Shared, reentrant))
    noise = NoiseScale(model, source=source)
    measure(noise, model, x, y, [5, 5])
    model.reentrant = None  # autograd.grad cannot go through a reentrant checkpoint
    counts = [1] * 10 if source == "per_example" else [5, 5]
    assert_defined(noise.estimate(), per_sample(model, x, y), counts)


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


def test_gradients_unscaled_before_the_measurement():
    model, x, y = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain, scaled = NoiseScale(model), NoiseScale(model, scaler=scaler)
    measure(plain, model, x, y, [5, 5])
    model.zero_grad()
    accumulate(model, x, y, scaled, scale=scaler.scale(torch.ones(())))
    scaler.unscale_(optimizer)
    scaled.step(grad_scale=1.0)
    assert last(scaled) == pytest.approx(last(plain), rel=1e-12)


def test_half_precision_gradients_are_measured_in_float32():
    model, x, y = make()
    half = copy.deepcopy(model).to(torch.float16)
    exact, rough = NoiseScale(model), NoiseScale(half)
    # Squares of these gradients overflow float16: their norms are far above 256.
    measure(exact, model, x, y, [5, 5], scale=300.0, loss_scale=300.0)
    measure(rough, half, x.half(), y.half(), [5, 5], scale=300.0, loss_scale=300.0)
    # 2 %: float16 has 11 bits, and noise is a difference of squares.
    assert last(rough) == pytest.approx(last(exact), rel=0.02)


# In the geometry of an optimizer


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


# What is refused


def nested(noise):
    with noise.microbatch(1), noise.microbatch(1):
        pass


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda n: n.step(), "parts"),
        (lambda n: n.microbatch(-1).__enter__(), "num_samples"),
        (lambda n: n.microbatch(1, weight=-1.0).__enter__(), "weight"),
        (nested, "inside another"),
        (lambda n: n.load_state_dict({}), "state_dict"),
    ],
)
def test_bad_calls(act, message):
    noise = NoiseScale(nn.Linear(2, 2))
    with pytest.raises(InputError, match=message):
        act(noise)


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
    ],
)
def test_bad_arguments(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=message):
        NoiseScale(model, **options)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


@pytest.mark.parametrize(
    "model",
    [[nn.Linear(2, 2)], nn.Linear(2, 2, device="meta"), nn.Linear(2, 2).requires_grad_(False)],
    ids=["a list", "on meta", "frozen"],
)
def test_what_cannot_be_measured(model):
    with pytest.raises(InputError, match="`model`"):
        NoiseScale(model)


def test_batch_norm_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match="BatchNorm1d"):
        NoiseScale(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoiseScale(model.eval())
