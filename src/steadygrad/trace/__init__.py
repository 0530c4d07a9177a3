"""Sketches of a training's steps, by which two runs are compared."""

from steadygrad.trace.trace import Trace

__all__ = ["Trace"]
