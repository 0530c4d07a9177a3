"""Diagnosis of gradients in any training loop.

It finds the first non-finite tensor, norms of sharded gradients, and mistakes of accumulation.
"""

from steadygrad.watch.accumulation import AccumulationCheck, Window, check_accumulation
from steadygrad.watch.finding import Finding
from steadygrad.watch.gradient_watch import GradientWatch

__all__ = [
    "AccumulationCheck",
    "Finding",
    "GradientWatch",
    "Window",
    "check_accumulation",
]
