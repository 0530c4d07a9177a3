"""Fixtures of the tests of studies."""

import pytest

from tests.contracts.problems import threads
from tests.unit.studies import framework


@pytest.fixture(autouse=True)
def one_thread():
    """Small models are fastest on one thread, and results depend on the number of threads."""
    with threads(1):
        yield


@pytest.fixture(autouse=True)
def speed_in_a_moment():
    with framework.speed_in_a_moment():
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of one complete run of the hand-made plan, for tests that only read it."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with threads(1):
        framework.begin(folder, at=None)
    return folder
