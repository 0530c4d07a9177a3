"""Every check accepts what it should and names what it refuses."""

import math

import pytest

from steadygrad._checks import InputError, check_choice, check_count, check_number


def test_good_values_come_back():
    assert check_number("x", 0.5, low=0, high=1) == 0.5
    assert check_number("x", 0, low=0) == 0
    assert check_count("n", 3) == 3
    assert check_choice("c", "a", ("a", "b")) == "a"


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan, math.inf, None, "1", True])
def test_bad_numbers(value):
    with pytest.raises(InputError) as error:
        check_number("x", value, low=0, high=1, high_open=True)
    expected = f"Parameter `x` should be a finite number in [0, 1). Found `x = {value!r}`."
    assert str(error.value) == expected


@pytest.mark.parametrize("value", [0, 2.0, True, None])
def test_bad_counts(value):
    with pytest.raises(InputError, match="`n` should be an integer of at least 1"):
        check_count("n", value)


def test_a_near_choice_is_suggested():
    with pytest.raises(InputError, match=r"one of 'paper', 'alternative'\. .*Did you mean 'paper'"):
        check_choice("mode", "papr", ("paper", "alternative"))
    with pytest.raises(InputError) as error:
        check_choice("mode", "zzz", ("paper", "alternative"))
    assert "Did you mean" not in str(error.value)


def test_an_input_error_is_a_value_error():
    assert issubclass(InputError, ValueError)
