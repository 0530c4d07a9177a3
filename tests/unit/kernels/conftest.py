"""Kernels for accelerators on a CPU, by Triton's interpreter."""

import os

import pytest

from steadygrad import kernels
from steadygrad.kernels import device


@pytest.fixture
def interpreter(monkeypatch):
    """Lets kernels for accelerators take CPU tensors; a list of the launches that follow."""
    # Older interpreters do not get along with NumPy from 2.4 on.
    pytest.importorskip("triton", "3.7", reason="triton 3.7 or newer is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, it does not interpret: tests/gpu tries its kernels")
    monkeypatch.setattr(kernels, "DEVICES", {"cpu"})
    launches, launch = [], device.launch

    def counted(name, *given, **constants):
        launches.append(name)
        launch(name, *given, **constants)

    monkeypatch.setattr(device, "launch", counted)
    return launches
