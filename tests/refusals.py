"""What somebody is told whose input cannot be used."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from steadygrad._checks import InputError


@contextmanager
def refused(*parts: str, kind: type[InputError] = InputError) -> Iterator[pytest.ExceptionInfo]:
    """Expects an error of this kind that is one line, with these parts in it."""
    with pytest.raises(kind) as error:
        yield error
    text = str(error.value)
    assert type(error.value) is kind
    assert "\n" not in text
    assert all(part in text for part in parts), text
