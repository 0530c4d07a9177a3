"""Triton kernels for CUDA devices: the passes of the rules, as compiled loops are on CPUs."""
