"""Every check accepts what it should and names what it refuses."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from steadygrad._checks import InputError, check_choice, check_count, check_number, check_type

SOURCE = Path(__file__).parents[2] / "src" / "steadygrad"


def test_types():
    assert check_type("x", 3, int, "a whole number") == 3
    with pytest.raises(InputError) as error:
        check_type("x", "3", int, "a whole number")
    assert str(error.value) == (
        "Parameter `x` should be of type int. Found '3', of type str. Remedy: a whole number."
    )


def test_good_values_come_back():
    assert check_number("x", 0.5, low=0, high=1) == 0.5
    assert check_number("x", 0, low=0) == 0
    assert check_count("n", 3) == 3
    assert check_choice("c", "a", ("a", "b")) == "a"


NUMBERS = {
    -0.1: "0 or more",
    1.0: "less than 1",
    7: "less than 1",
    math.nan: "look where it is computed",
    math.inf: "look where it is computed",
    None: "a plain number",
    "1": "the number itself, without quotes",
}


@pytest.mark.parametrize("value", [-0.1, 1.0, 7, math.nan, math.inf, None, "1"])
def test_bad_numbers(value):
    with pytest.raises(InputError) as error:
        check_number("x", value, low=0, high=1, high_open=True)
    assert str(error.value) == (
        f"Parameter `x` should be a finite number in [0, 1). Found `x = {value!r}`. "
        f"Remedy: {NUMBERS[value]}."
    )


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"low": 0, "low_open": True}, "(0, inf). Found `x = 0`. Remedy: more than 0."),
        (2, {"high": 1}, "(-inf, 1]. Found `x = 2`. Remedy: 1 or less."),
        (True, {"low": 0, "high": 1}, "[0, 1]. Found `x = True`. Remedy: a plain number."),
        (2, {"high": 1, "remedy": "try 0.5"}, "(-inf, 1]. Found `x = 2`. Remedy: try 0.5."),
        (
            np.arange(1),
            {},
            "(-inf, inf). Found `x = array([0])`. Remedy: a plain number, as by `.item()`.",
        ),
    ],
    ids=str,
)
def test_bounds_and_remedies(value, bounds, message):
    with pytest.raises(InputError) as error:
        check_number("x", value, **bounds)
    assert str(error.value) == f"Parameter `x` should be a finite number in {message}"


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (0, "1 or more"),
        (2.0, "2, an int"),
        (2.5, "a plain integer"),
        (math.nan, "a plain integer"),
        (True, "a plain integer"),
        (None, "a plain integer"),
        ("3", "the integer itself, without quotes"),
    ],
)
def test_bad_counts(value, remedy):
    start = f"Parameter `n` should be an integer of at least 1. Found `n = {value!r}`. Remedy: "
    with pytest.raises(InputError) as error:
        check_count("n", value)
    assert str(error.value) == f"{start}{remedy}."
    with pytest.raises(InputError) as error:
        check_count("n", value, remedy="split the batch")
    assert str(error.value) == f"{start}split the batch."


@pytest.mark.parametrize(
    "check", [check_number, check_count, lambda n, v: check_choice(n, str(v), ("a", "b"))]
)
@pytest.mark.parametrize("value", [np.zeros((40, 40)), "a" * 400], ids=["array", "word"])
def test_a_message_is_one_short_line(check, value):
    with pytest.raises(InputError) as error:
        check("x", value)
    assert "\n" not in str(error.value)
    assert 80 < len(str(error.value)) < 250


def test_a_near_choice_is_suggested():
    listed = r"one of 'paper', 'alternative'\. .*Remedy: did you mean 'paper'\?"
    with pytest.raises(InputError, match=listed):
        check_choice("mode", "papr", ("paper", "alternative"))
    with pytest.raises(InputError) as error:
        check_choice("mode", "zzz", ("paper", "alternative"))
    assert str(error.value) == (
        "Parameter `mode` should be one of 'paper', 'alternative'. Found `mode = 'zzz'`. "
        "Remedy: one of these."
    )


def test_an_input_error_is_a_value_error():
    assert issubclass(InputError, ValueError)


def errors_without_remedy(path):
    """Lines of the errors of ours that say what was found, and not what to do about it."""
    for node in ast.walk(ast.parse(path.read_text())):
        name = getattr(getattr(node, "func", None), "id", "")
        # argparse's own errors end with the parser's remedy.
        ours = name.endswith("Error") and name != "ArgumentTypeError"
        if isinstance(node, ast.Call) and ours and node.args:
            texts = [c.value for c in ast.walk(node.args[0]) if isinstance(c, ast.Constant)]
            message = "".join(text for text in texts if isinstance(text, str))
            if "Found" in message and "Remedy" not in message:
                yield node.lineno


def test_every_error_has_a_remedy():
    files = sorted(SOURCE.rglob("*.py"))
    assert len(files) > 100
    lines = {str(path.relative_to(SOURCE)): [*errors_without_remedy(path)] for path in files}
    assert {name: found for name, found in lines.items() if found} == {}


def test_an_error_without_a_remedy_is_seen(tmp_path):
    file = tmp_path / "x.py"
    file.write_text('raise InputError(f"Found {x}. Remedy: y.")\nraise InputError(f"Found {x}.")\n')
    assert [*errors_without_remedy(file)] == [2]
