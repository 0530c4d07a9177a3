"""`NoiseScale` on one step against the definitions, and what it refuses."""

import pytest
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference
from tests.unit.noise.training_loop import (
    COUNTS,
    EXACT,
    last,
    make,
    measure,
    micro_weight,
    per_sample,
)


@pytest.mark.parametrize("accumulation", ["mean", "sum", "samples"])
@pytest.mark.parametrize("source", ["microbatch", "accumulated"])
def test_unequal_micro_batches(accumulation, source):
    model, x, y = make()
    noise = NoiseScale(model, source=source, accumulation=accumulation)
    measure(noise, model, x, y, accumulation=accumulation)
    weights = [micro_weight(accumulation, n, COUNTS) for n in COUNTS]
    expected = reference.signal_and_noise(per_sample(model, x, y), COUNTS, weights)
    assert last(noise) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("weights", [[0.2, 0.5, 0.3], [0.4, 1.0, 0.6]], ids=str)
def test_explicit_weights(weights):
    model, x, y = make()
    noise = NoiseScale(model)
    measure(noise, model, x, y, weights=weights)
    expected = reference.signal_and_noise(per_sample(model, x, y), COUNTS, weights)
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_a_wrong_accumulation_leaves_the_ratio_right():
    model, x, y = make()
    right, wrong = NoiseScale(model), NoiseScale(model)
    for noise, factor in [(right, "mean"), (wrong, "sum")]:
        measure(noise, model, x, y, counts=[5, 5], accumulation=factor)
    assert wrong.estimate().value.item() == pytest.approx(right.estimate().value.item(), rel=1e-12)
    assert wrong.estimate().grad_sq_norm.item() == pytest.approx(4 * last(right)[0], rel=1e-12)


@pytest.mark.parametrize("counts", [[10], [5, 5], COUNTS], ids=str)
def test_single_examples_as_parts(counts):
    model, x, y = make()
    noise = NoiseScale(model, source="per_example", accumulation="samples")
    measure(noise, model, x, y, counts, accumulation="samples")
    expected = reference.signal_and_noise(per_sample(model, x, y), [1] * 10, [1.0] * 10)
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_groups_add_up_and_each_is_right():
    model, x, y = make()
    noise = NoiseScale(model, groups=lambda name: name.split(".")[1])
    measure(noise, model, x, y)
    whole = noise.estimate()
    assert set(whole.by_group) == {"weight", "bias"}
    for name, group in whole.by_group.items():
        rows = per_sample(model, x, y, wanted=lambda n, name=name: n.endswith(name))
        expected = reference.signal_and_noise(rows, COUNTS, [1.0] * 3)
        got = [group.grad_sq_norm.item(), group.noise_trace.item()]
        assert got == pytest.approx(expected, rel=EXACT)
    parts = whole.by_group.values()
    assert sum(g.noise_trace.item() for g in parts) == pytest.approx(whole.noise_trace.item())


def nested(noise):
    with noise.microbatch(1), noise.microbatch(1):
        pass


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda n: n.step(), "at least 2 parts"),
        (lambda n: n.microbatch(-1).__enter__(), "num_samples"),
        (lambda n: n.microbatch(1, weight=-1.0).__enter__(), "weight"),
        (lambda n: nested(n), "one micro-batch at a time"),
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
    ],
)
def test_bad_arguments(options, message):
    model = nn.Linear(2, 2)
    with pytest.raises(InputError, match=message):
        NoiseScale(model, **options)
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_what_is_no_model():
    with pytest.raises(InputError, match="model"):
        NoiseScale([nn.Linear(2, 2)])
