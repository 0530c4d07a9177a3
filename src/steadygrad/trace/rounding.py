"""Measures what one rounding of the weights changes in a pass, at each module."""

import math
import random
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from steadygrad._names import own_name
from steadygrad.numerics import wide
from steadygrad.shards import local
from steadygrad.trace.equations import distance
from steadygrad.trace.passes import Passes, generator_state
from steadygrad.trace.sketches import Key, Sketches
from steadygrad.watch.hooks import Shared, tensors_of

# Steps at whose end it is measured.
_STEPS = 3


class Rounding:
    """Repeats a step's last pass, with its weights and with them moved by one rounding.

    Weights, gradients, buffers and random generators are afterwards as they were.

    Args:
        model: The model as it is called.
        shared: What the hooks know: they see the repeated passes as any other.
        sketches: Those of the step.
    """

    def __init__(self, model: nn.Module, shared: Shared, sketches: Sketches) -> None:
        self._model, self._shared, self._sketches = model, shared, sketches
        self._left = _STEPS
        # What the last pass was given, the generators before it, and the type of autocast.
        self._call: tuple[Any, list[Tensor], Any, torch.dtype | None]
        self.passes: Passes | None = None  # a pass that is repeated

    def keep(self, passes: Passes, inputs: Any) -> None:
        """Keeps what a pass is given, to repeat it."""
        passes.keep = self._left > 0
        if not passes.keep:
            return
        device = self._shared.device.type
        cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        others = random.getstate(), np.random.get_state()
        self._call = (inputs, generator_state(self._shared.device), others, cast)

    def measure(self, passes: Passes) -> dict[Key, float]:
        """Relative distances between the two passes, by name."""
        if not self._left or not passes.received:
            return {}
        self._left -= 1
        types = [getattr(torch, one.type) for one in self._sketches.found.values()]
        eps = max(torch.finfo(t).eps for t in types if t.is_floating_point and t.itemsize > 1)
        with ExitStack() as kept:
            self._keep_model(kept)
            before = self._repeat(passes)
            for p in self._model.parameters():
                part = local(p.data)
                sign = 1 - 2 * (torch.arange(part.numel(), device=part.device) % 2)
                part.copy_(part.to(wide(part.dtype)) * (1 + eps * sign.view(part.shape)))
            after = self._repeat(passes)
        rows, found = {key: row for key, _, row in before.numbers()}, dict[Key, float]()
        for key, one, (*then, _, _) in after.numbers():
            *z, square, _ = rows.get(key, [0.0, 0.0])
            if square:
                found[key] = distance(z, then) / math.sqrt(square * max(one.rows, 1))
        return found

    def _keep_model(self, kept: ExitStack) -> None:
        """Puts weights, buffers, gradients and generators back at the end."""
        device = self._shared.device
        kept.callback(setattr, self._shared, "current", None)
        kept.callback(random.setstate, random.getstate())
        kept.callback(np.random.set_state, np.random.get_state())
        kept.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        for tensor in (*self._model.parameters(), *self._model.buffers()):
            # Not on the tensor itself, whose version a graph may have noted.
            part = local(tensor.data)
            kept.callback(part.copy_, part.clone())
        for p in self._model.parameters():
            kept.callback(setattr, p, "grad", p.grad)
            if p.grad is not None and not p.grad.is_sparse:
                # DDP may keep gradients in memory of its own, which a pass overwrites.
                kept.callback(local(p.grad).copy_, local(p.grad).clone())

    def _repeat(self, passes: Passes) -> Sketches:
        inputs, state, others, cast = self._call
        args, kwargs = _pytree.tree_map_only(Tensor, _cut, inputs)
        found, device = Sketches(), self._shared.device
        random.setstate(others[0])
        np.random.set_state(others[1])
        torch.set_rng_state(state[0])
        if device.type == "cuda":
            torch.cuda.set_rng_state(state[1], device)
        self.passes = Passes(found, device)
        for p in self._model.parameters():
            p.grad = None
        with torch.enable_grad(), torch.autocast(device.type, cast, enabled=cast is not None):
            outputs = tensors_of(self._model(*args, **kwargs))
        self.passes = None
        some = [(outputs[i], gradient) for i, gradient in passes.received.items()]
        torch.autograd.backward([x for x, _ in some], [g for _, g in some])
        for name, p in self._model.named_parameters():
            if p.grad is not None:
                found.take(Key("gradient", own_name(name, self._model)), p.grad)
        return found


def _cut(tensor: Tensor) -> Tensor:
    """The tensor as the loop's own graph does not see it."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
