"""Backend for accelerators: passes as Triton kernels, one module for each optimizer."""
