"""Eight-bit states for small problems too."""

import pytest

from steadygrad.optim import codes


@pytest.fixture(autouse=True)
def small_parameters_are_coded(monkeypatch):
    """Matrices, that is: vectors and numbers have rows of one element, and never are."""
    monkeypatch.setattr(codes, "LEAST", 1)
    monkeypatch.setattr(codes, "SHORTEST", 2)


@pytest.fixture
def same_bits_at_all_places(monkeypatch):
    """For parameters that are to go as they do elsewhere in an optimizer, or in another."""
    monkeypatch.setattr(codes, "PLACE", 0)
