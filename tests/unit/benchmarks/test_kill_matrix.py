"""Faults that are planted: which there are."""

from benchmarks.kill_mutants import changes_of, edit_of

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


def test_every_fault_that_may_show_and_no_other():
    data = TEXT.encode()
    found = {(kind, data[a:b].decode(), new.decode()) for kind, a, b, new in changes_of(TEXT)}
    assert found == FAULTS
    assert all(edit_of("file.py", TEXT, *change) for _, *change in changes_of(TEXT))
