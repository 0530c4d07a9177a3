import pytest

from steadygrad.optim import codes
from tests.distributed.ranks import code_small_parameters


@pytest.fixture(autouse=True)
def _small_parameters_have_codes(monkeypatch):
    """In this process as on all ranks."""
    for name in ("LEAST", "SHORTEST"):
        monkeypatch.setattr(codes, name, getattr(codes, name))
    code_small_parameters()
