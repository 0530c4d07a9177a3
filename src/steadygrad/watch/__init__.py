"""Diagnosis of gradients: the first non-finite tensor, norms, and mistakes of accumulation."""

from steadygrad.watch.accumulation import AccumulationCheck, Window, check_accumulation
from steadygrad.watch.finding import Finding
from steadygrad.watch.gradient_watch import GradientWatch

__all__ = ["AccumulationCheck", "Finding", "GradientWatch", "Window", "check_accumulation"]
