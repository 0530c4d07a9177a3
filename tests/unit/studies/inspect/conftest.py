"""The one complete study that several tests read."""

import pytest
import torch

from tests.unit.studies.inspect.runs import Watcher, look, spec


@pytest.fixture(scope="package")
def whole(tmp_path_factory):
    """One complete study of the healthy task, shared by the tests that only read it."""
    torch.set_num_threads(1)
    monitor = Watcher()
    return look(tmp_path_factory.mktemp("whole") / "run", spec("healthy"), monitor=monitor), monitor
