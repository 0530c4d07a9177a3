"""Eight-bit states for small problems too."""

import pytest

from tests.contracts.problems import small_codes


@pytest.fixture(autouse=True)
def small_parameters_are_coded():
    with small_codes():
        yield
