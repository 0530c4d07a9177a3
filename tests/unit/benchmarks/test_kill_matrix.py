"""Faults that are planted: which there are, and where they belong in changed code."""

import pytest
from benchmarks.kill_mutants import changes_of, draw, edit_of, planted

TEXT = '''"""A text."""
from math import inf

__all__ = ["f"]


def f(x: int = 3, *rest: "int | 4") -> float:
    """Another text, with 5."""
    if x is None or not rest:
        raise ValueError(f"{x + 1}")
    y = max(x, 2.0) * len(rest)
    return y if y < inf else 0
'''
FAULTS = {
    ("deleted statement", "y = max(x, 2.0) * len(rest)", "pass"),
    ("deleted statement", "return y if y < inf else 0", "pass"),
    ("deleted statement", 'raise ValueError(f"{x + 1}")', "pass"),
    ("moved constant", "3", "4"),
    ("moved constant", "2.0", "3.0"),
    ("moved constant", "0", "1"),
    ("exchanged operator", " or ", " and "),
    ("exchanged operator", " * ", " / "),
    ("exchanged operator", "max", "min"),
    ("inverted comparison", " is ", " is not "),
    ("inverted comparison", " < ", " >= "),
    ("negated condition", "x is None or not rest", "not (x is None or not rest)"),
}


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "src" / "steadygrad" / "room"
    place.mkdir(parents=True)
    (place / "file.py").write_text(TEXT)
    return tmp_path


def test_every_fault_that_may_show_and_no_other():
    data = TEXT.encode()
    found = {(kind, data[a:b].decode(), new.decode()) for kind, a, b, new in changes_of(TEXT)}
    assert found == FAULTS
    assert all(edit_of("file.py", TEXT, *change) for _, *change in changes_of(TEXT))


def test_the_same_seed_draws_the_same_and_each_compiles(folder):
    found = draw(folder, 1, 4, least=4)
    assert found == draw(folder, 1, 4, least=4) != draw(folder, 2, 4, least=4)
    assert {fault["room"] for fault in found} == {"room"}
    assert all(planted(folder, fault) for fault in found)


def test_a_fault_follows_its_lines_and_is_gone_with_them(folder):
    fault = next(f for f in draw(folder, 1, 9, least=9) if "y = max" in f["edits"][0]["before"][0])
    (file,) = folder.rglob("*.py")
    file.write_text(TEXT.replace("def f(", "NEW = 1\n\n\ndef f("))
    (text,) = planted(folder, fault).values()
    assert text.splitlines()[13:14] == fault["edits"][0]["after"]
    file.write_text(TEXT.replace("y = max(x, 2.0)", "y = max(x, 7.0)"))
    assert planted(folder, fault) is None
