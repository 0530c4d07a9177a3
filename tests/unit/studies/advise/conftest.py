"""The one complete study that several files of tests read."""

import pytest
import torch

from tests.unit.studies.helpers import Watcher, study


@pytest.fixture(scope="package")
def whole(tmp_path_factory):
    """One complete study, shared by the tests that only read it."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("whole") / "run"
    monitor = Watcher()
    return study(folder, monitor=monitor), monitor
