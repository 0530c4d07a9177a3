"""Eight-bit states for small problems too."""

import pytest

from steadygrad.optim import codes


@pytest.fixture(autouse=True)
def small_parameters_are_coded(monkeypatch):
    """Matrices, that is: vectors and numbers have rows of one element, and never are."""
    monkeypatch.setattr(codes, "LEAST", 1)
    monkeypatch.setattr(codes, "SHORTEST", 2)
