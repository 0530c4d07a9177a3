"""Fixtures of the tests of studies."""

import pytest
import torch


@pytest.fixture(autouse=True)
def one_thread():
    """Small models are fastest on one thread, and results depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
