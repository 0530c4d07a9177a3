"""The trade-off and the learning-rate rules against their equations."""

import pytest

from steadygrad._checks import InputError
from steadygrad.formulas.batch_size import (
    LR_RULES,
    PLAIN_LR_RULES,
    learning_rate,
    samples_ratio,
    steps_ratio,
)


@pytest.mark.parametrize("batch", [1.0, 64.0, 1e6])
def test_the_trade_off(batch):
    assert (steps_ratio(batch, 100.0) - 1) * (samples_ratio(batch, 100.0) - 1) == pytest.approx(1)


def test_the_critical_batch_costs_twice_of_both():
    assert (steps_ratio(100.0, 100.0), samples_ratio(100.0, 100.0)) == (2, 2)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("constant", 1.0),
        ("sqrt", 2.0),
        ("linear", 4.0),
        ("sgd", (1 + 64 / 8) / (1 + 64 / 32)),
        ("adam", (8**0.5 + 8**-0.5) / (2**0.5 + 2**-0.5)),
    ],
)
def test_learning_rates_at_four_times_the_batch(rule, expected):
    assert learning_rate(1.0, 32, 8, rule, noise_scale=64.0) == pytest.approx(expected)
    assert learning_rate(0.1, 8, 8, rule, noise_scale=64.0) == pytest.approx(0.1)


@pytest.mark.parametrize("rule", LR_RULES)
def test_only_the_plain_rules_need_no_noise_scale(rule):
    if rule in PLAIN_LR_RULES:
        assert learning_rate(1.0, 8, 8, rule) == 1.0
    else:
        with pytest.raises(InputError, match="Remedy: measure it"):
            learning_rate(1.0, 8, 8, rule)


def test_sgd_is_linear_far_below_and_flat_far_above_the_noise_scale():
    assert learning_rate(1.0, 4, 2, "sgd", 1e9) == pytest.approx(2, rel=1e-6)
    assert learning_rate(1.0, 4e9, 2e9, "sgd", 1.0) == pytest.approx(1, rel=1e-6)


def test_adam_peaks_at_the_noise_scale():
    rates = [learning_rate(1.0, b, 8, "adam", 64.0) for b in (32, 64, 128)]
    assert rates[1] == max(rates)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("cubic",), "`rule` should be one of"),
        (("sgd",), "`noise_scale` should be positive for rule 'sgd'"),
        (("adam", -1.0), "Remedy: measure it"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(InputError, match=message):
        learning_rate(1.0, 16, 8, *arguments)
