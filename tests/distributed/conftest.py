import pytest

from tests.contracts.problems import small_codes


@pytest.fixture(autouse=True)
def _small_parameters_have_codes():
    """In this process as on all ranks."""
    with small_codes():
        yield
