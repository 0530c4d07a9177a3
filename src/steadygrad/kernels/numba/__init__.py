"""Backend for CPUs: passes as loops that Numba compiles, one module for each optimizer."""
