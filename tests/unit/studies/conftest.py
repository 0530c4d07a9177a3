"""Fixtures of the tests of studies."""

import pytest
import torch

from tests.unit.studies.framework import begin


@pytest.fixture(autouse=True)
def one_thread():
    """Small models are fastest on one thread, and results depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def speed_in_a_moment(monkeypatch):
    """Studies begin by measuring the speed of their task, which decides little here."""
    monkeypatch.setattr("steadygrad.studies.calibration.SECONDS", 0.01)
    monkeypatch.setattr("steadygrad.studies.calibration.WARM_UP_STEPS", 1)


@pytest.fixture(scope="session")
def whole(tmp_path_factory):
    """The folder of one complete run of the hand-made plan, for tests that only read it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    begin(folder, at=None)
    return folder
