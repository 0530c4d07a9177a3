"""ScaledAdam, LANS and LAMB, exact, sharded and resumable; schedules; groups by pattern."""

from steadygrad.optim.batched import BatchedOptimizer
from steadygrad.optim.groups import param_groups
from steadygrad.optim.layerwise import LAMB, LANS
from steadygrad.optim.scaled_adam import ScaledAdam
from steadygrad.optim.schedules import Eden, WarmupHoldDecay

__all__ = [
    "LAMB",
    "LANS",
    "BatchedOptimizer",
    "Eden",
    "ScaledAdam",
    "WarmupHoldDecay",
    "param_groups",
]
