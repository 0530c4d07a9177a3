"""Whether an overflow is the scale's fault: the step once more, with a scale close to zero."""

import random
import sys
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from steadygrad.studies.trainer import Trainer

__all__ = ["nonfinite_at_any_scale", "rng_state"]

# Gradients that overflow only because they are large are finite at this scale.
PROBE_SCALE = 2.0**-60


def rng_state(trainer: Trainer) -> Callable[[], None]:
    """Remembers the states of all random generators; a call of what it returns restores them."""
    device, numpy = trainer.context.device, sys.modules.get("numpy")
    restore: list[Callable[[], object]] = [
        partial(torch.set_rng_state, torch.get_rng_state()),
        partial(random.setstate, random.getstate()),
    ]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        restore.append(partial(module.set_rng_state, module.get_rng_state()))
    if numpy is not None:
        restore.append(partial(numpy.random.set_state, numpy.random.get_state()))

    def again() -> None:
        for one in restore:
            one()

    return again


def nonfinite_at_any_scale(
    trainer: Trainer, indices: Tensor, restore_rng: Callable[[], None]
) -> list[str]:
    """Layers whose gradients in a step are not finite whatever the scale.

    Forward and backward pass of the step that was just skipped are repeated with a loss scale of
    2**-60 and no layer scales, on the whole batch's sample numbers of shape ``(n,)`` and with the
    random numbers that ``restore_rng`` brings back. Weights, buffers, scales and random numbers
    are afterwards as they were.
    """
    scaler, restore_now = trainer.scaler, rng_state(trainer)
    state = scaler.state_dict()
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    layers = {
        name: {**row, "scale": 1.0 if name else PROBE_SCALE}
        for name, row in state["layers"].items()
    }
    scaler.load_state_dict({**state, "layers": layers})
    restore_rng()
    trainer.backward(indices)
    restore_now()
    scaler.unscale_(trainer.optimizer)
    scaler.update()
    found: list[str] = scaler.culprits()
    trainer.optimizer.zero_grad()
    scaler.load_state_dict(state)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return found
