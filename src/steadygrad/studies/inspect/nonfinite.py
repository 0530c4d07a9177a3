"""Whether an overflow is the scale's fault: the step once more, with a scale close to zero."""

from collections.abc import Callable

import torch
from torch import Tensor

from steadygrad.studies.order import generators_kept
from steadygrad.studies.trainer import Trainer

__all__ = ["nonfinite_at_any_scale"]

# Gradients that overflow only because they are large are finite at this scale.
PROBE_SCALE = 2.0**-60


def nonfinite_at_any_scale(
    trainer: Trainer, indices: Tensor, restore_rng: Callable[[], None]
) -> list[str]:
    """Layers whose gradients in a step are not finite whatever the scale.

    Forward and backward pass of the step that was just skipped are repeated with a loss scale of
    2**-60 and no layer scales, on the whole batch's sample numbers of shape ``(n,)`` and with the
    random numbers that ``restore_rng`` brings back. Weights, buffers, scales and random numbers
    are afterwards as they were.
    """
    scaler = trainer.scaler
    state = scaler.state_dict()
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    layers = {
        name: {**row, "scale": 1.0 if name else PROBE_SCALE}
        for name, row in state["layers"].items()
    }
    scaler.load_state_dict({**state, "layers": layers})
    with generators_kept(trainer.context.device):
        restore_rng()
        trainer.backward(indices)
    scaler.unscale_(trainer.optimizer)
    scaler.update()
    found: list[str] = scaler.culprits()
    trainer.optimizer.zero_grad()
    scaler.load_state_dict(state)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return found
