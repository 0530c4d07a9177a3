"""Diagnosis of gradients in any loop: what became non-finite first, true norms, accumulation.

``finding`` searches the events of a pass for its first fault, ``passes`` collects them, ``taps``
are the hooks behind each module. ``norms`` and ``accumulation`` stand on their own.
"""

from steadygrad.watch.accumulation import AccumulationCheck, Window, check_accumulation
from steadygrad.watch.finding import Finding
from steadygrad.watch.gradient_watch import GradientWatch
from steadygrad.watch.norms import GradientNorms, gradient_norms

__all__ = [
    "AccumulationCheck",
    "Finding",
    "GradientNorms",
    "GradientWatch",
    "Window",
    "check_accumulation",
    "gradient_norms",
]
