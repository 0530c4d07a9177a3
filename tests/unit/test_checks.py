"""Every check accepts what it should and names what it refuses."""

import ast
import math
from pathlib import Path

import numpy as np
import pytest

from steadygrad._checks import InputError, check_choice, check_count, check_number, check_type
from tests.refusals import refused

SOURCE = Path(__file__).parents[2] / "src" / "steadygrad"


def test_good_values_come_back():
    assert check_number("x", 0.5, low=0, high=1) == 0.5
    assert check_number("x", 0, low=0) == 0
    assert check_number("x", 1, high=1) == 1
    assert check_count("n", 3) == 3
    assert check_count("n", 0, low=0) == 0
    assert check_choice("c", "a", ("a", "b")) == "a"
    assert check_type("x", 3, int, "a whole number") == 3
    assert issubclass(InputError, ValueError)


@pytest.mark.parametrize(
    ("value", "bounds", "interval", "remedy"),
    [
        (-0.1, {"low": 0, "high": 1}, "[0, 1]", "0 or more"),
        (7, {"low": 0, "high": 1}, "[0, 1]", "1 or less"),
        (0, {"low": 0, "low_open": True}, "(0, inf)", "more than 0"),
        (1.0, {"high": 1, "high_open": True}, "(-inf, 1)", "less than 1"),
        (2, {"high": 1, "remedy": "try 0.5"}, "(-inf, 1]", "try 0.5"),
        (math.nan, {}, "(-inf, inf)", "look where it is computed"),
        (math.inf, {}, "(-inf, inf)", "look where it is computed"),
        (10**400, {}, "(-inf, inf)", "look where it is computed"),
        (None, {}, "(-inf, inf)", "a plain number"),
        (True, {"low": 0, "high": 1}, "[0, 1]", "a plain number"),
        ("1", {}, "(-inf, inf)", "without quotes"),
        (np.arange(1), {}, "(-inf, inf)", "`.item()`"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_bad_numbers(value, bounds, interval, remedy):
    with refused(f" {interval}. ") as error:
        check_number("x", value, **bounds)
    assert str(error.value).endswith(f"{remedy}.")


@pytest.mark.parametrize(
    ("value", "remedy"),
    [
        (0, "1 or more"),
        (2.0, "2, an int"),
        (2.5, "a plain integer"),
        (math.nan, "a plain integer"),
        (True, "a plain integer"),
        ("3", "without quotes"),
    ],
)
def test_bad_counts(value, remedy):
    with refused() as error:
        check_count("n", value)
    assert str(error.value).endswith(f"{remedy}.")


@pytest.mark.parametrize(
    "check", [check_number, check_count, lambda n, v: check_choice(n, str(v), ("a", "b"))]
)
@pytest.mark.parametrize("value", [np.zeros((40, 40)), "a" * 400], ids=["array", "word"])
def test_a_message_is_one_short_line(check, value):
    with refused() as error:
        check("x", value)
    assert 80 < len(str(error.value)) < 250


def errors_without_remedy(source):
    """Lines of the errors of ours that say what was found, and not what to do about it."""
    for node in ast.walk(ast.parse(source)):
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
    lines = {file.name: [*errors_without_remedy(file.read_text())] for file in files}
    assert {name: found for name, found in lines.items() if found} == {}
