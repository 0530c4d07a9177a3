"""The table of cases that `make test` takes."""

import ast
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.quick import CASES, spread

HERE = Path(__file__).parent


@pytest.mark.parametrize("file", CASES)
def test_every_entry_names_a_test(file):
    tree = ast.parse((HERE / file).read_text(encoding="utf-8"))
    names = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert CASES[file].keys() <= names


def test_as_many_cases_are_quick(request):
    """No more than the table says, of the tests that were collected here."""
    quick = Counter(
        item.nodeid.removeprefix("tests/").partition("[")[0]
        for item in request.session.items
        if item.get_closest_marker("slow") is None
    )
    assert quick["test_quick.py::test_as_many_cases_are_quick"] == 1
    for file, tests in CASES.items():
        for name, count in tests.items():
            assert quick[f"{file}::{name}"] <= count


def test_few_cases_have_all_values():
    cases = [
        SimpleNamespace(nodeid=f"test[{a}-{b}]", callspec=SimpleNamespace(params={"a": a, "b": b}))
        for a, b in product(range(6), "xyz")
    ]
    kept = [one.callspec.params for one in spread(cases, 6)]
    assert len(kept) == 6
    assert {one["a"] for one in kept} == {*range(6)}
    assert {one["b"] for one in kept} == {*"xyz"}
    assert spread(cases, 0) == []
    assert len(spread(cases, 99)) == len(cases)
