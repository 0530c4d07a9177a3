"""Whether an overflow is the scale's fault: the step once more, with next to no scale."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steadygrad.studies.engine import Engine

__all__ = ["Chance", "chance", "never_finite"]

# What overflows only because it is large is finite now; what is made infinite stays so.
PROBE_SCALE = 2.0**-60

Chance = Sequence[Tensor]
"""States of torch's random generators."""


def chance(engine: Engine) -> Chance:
    """The random numbers to come; to be asked for before a step."""
    states = [torch.get_rng_state()]
    if engine.ranks.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(engine.ranks.device))
    return states


def never_finite(engine: Engine, indices: Tensor, before: Chance) -> list[str]:
    """Layers in which a step has values that are not finite whatever the scale.

    Forward and backward pass are repeated with the loss times 2**-60 and no other scales. Neither
    weights, buffers, scales nor random numbers are changed by it.

    Args:
        engine: After the step that was left out.
        indices: The step's samples, of all ranks.
        before: The random numbers the step began with.
    """
    devices = [engine.ranks.device] if engine.ranks.device.type == "cuda" else []
    scaler, state = engine.scaler, engine.scaler.state_dict()
    buffers = [(buffer, buffer.clone()) for buffer in engine.model.buffers()]
    with torch.random.fork_rng(devices):
        torch.set_rng_state(before[0])
        if devices:
            torch.cuda.set_rng_state(before[1], devices[0])
        scaler.load_state_dict({**state, "layers": _without_scales(state["layers"])})
        scaler.scale(engine.losses(engine.ranks.share(indices)).mean()).backward()
    scaler.unscale_(engine.optimizer)
    scaler.update()
    found: list[str] = scaler.culprits()
    engine.optimizer.zero_grad()
    scaler.load_state_dict(state)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return found


def _without_scales(layers: dict[str, Any]) -> dict[str, Any]:
    return {name: {**row, "scale": 1.0 if name else PROBE_SCALE} for name, row in layers.items()}
