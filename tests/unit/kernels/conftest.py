"""Triton's kernels on a CPU, by its interpreter."""

import os

import pytest

from steadygrad import kernels


@pytest.fixture
def interpreter(monkeypatch):
    """Gives CPU tensors to Triton's kernels; a list of the launches that follow."""
    # Older interpreters do not get along with NumPy from 2.4 on.
    pytest.importorskip("triton", "3.7", reason="triton 3.7 or newer is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, it does not interpret: tests/gpu tries its kernels")
    from steadygrad.kernels.triton import runtime

    monkeypatch.setattr(kernels, "BACKENDS", {"cpu": "triton"})
    launches, start = [], runtime._start

    def counted(kernel, *given, **named):
        launches.append(named.get("body", kernel).fn.__name__)
        start(kernel, *given, **named)

    monkeypatch.setattr(runtime, "_start", counted)
    return launches
