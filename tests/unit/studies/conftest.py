"""Fixtures of the tests of studies."""

import pytest
import torch

from tests.unit.studies import framework


@pytest.fixture(autouse=True)
def one_thread():
    """Small models are fastest on one thread, and results depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def speed_in_a_moment():
    with framework.speed_in_a_moment():
        yield


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of one complete run of the hand-made plan, for tests that only read it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    framework.begin(folder, at=None)
    return folder
