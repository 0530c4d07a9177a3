"""Imports of trainers, which warn of much that is no matter of these tests."""

import importlib
import warnings

import pytest


def importorskip(package, *modules):
    """Imports a package's modules; skips the tests that ask where it is not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = pytest.importorskip(package, reason="group integrations")
        for module in modules:
            importlib.import_module(module)
    return found
