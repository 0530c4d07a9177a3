"""A base class for optimizers that work on same-shape parameters stacked into one tensor."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_choice
from steadygrad.optim.checks import dense_gradient
from steadygrad.optim.state import TypeKeepingOptimizer, names_of
from steadygrad.shards import aligned, as_shard, local


@dataclass(eq=False)
class Batch:
    """Stacked parameters of one shape and group: copies, to be changed in place or anew."""

    param: Tensor  # the parameters, with shape `[n, *shape]`
    grad: Tensor  # their gradients, with the same shape; zeros where a gradient is None
    state: dict[str, Tensor]  # by name, with shape `[n, ...]`
    names: tuple[str, ...]  # `params.3` for a group's fourth that has none
    params: tuple[Tensor, ...]  # the parameters themselves
    has_grad: tuple[bool, ...]  # which of them have a gradient, on the host

    def __len__(self) -> int:
        return len(self.params)


class BatchedOptimizer(TypeKeepingOptimizer):
    """Base class for your own optimizer, when a model has many parameters of few shapes.

    A subclass writes its rule once, for a stack of parameters with a leading dimension ``n``, and
    a model of hundreds of tensors takes a few kernels a step instead of hundreds. State is kept
    for each parameter, in its own type, and stacked for the step only: ``state_dict``, checkpoints
    and ``deepcopy`` work as with any torch optimizer.

    .. code-block:: python

        class Momentum(BatchedOptimizer):
            def __init__(self, params, lr=1e-2, momentum=0.9):
                super().__init__(params, {"lr": lr, "momentum": momentum})
                self.allocate_state()

            def init_state(self, batch):
                return {"velocity": torch.zeros_like(batch.param)}

            def step(self, closure=None):
                loss = None if closure is None else closure()
                for group in self.param_groups:
                    with self.batched_params(group) as batches:
                        for batch in batches:
                            velocity = batch.state["velocity"]  # [n, *shape]
                            velocity.mul_(group["momentum"]).add_(batch.grad)
                            batch.param.sub_(group["lr"] * velocity)
                return loss

    A norm for each parameter is one over all dimensions but the first. **None gradients** count as
    zeros unless ``batched_params`` skips them; zeros still decay averages and, with momentum, move
    a parameter. **Sharded parameters** (DTensors) are batched by their local parts, and state of
    that shape becomes a DTensor; a norm is that of the local part.

    References:
        | BatchedOptimizer in icefall's ``optim.py``, by Daniel Povey (2022)
        | https://github.com/k2-fsa/icefall
    """

    _allocates = False

    def init_state(self, batch: Batch) -> Mapping[str, Tensor]:
        """State of parameters that have none yet, by name, with shape ``[n, ...]``.

        Members that have one keep it: a row must depend on its own parameter only.
        """
        return {}

    def allocate_state(self) -> None:
        """Makes the state of every parameter now, for checkpoints before the first step."""
        self._allocates = True
        self._fill_state()

    @contextmanager
    def batched_params(
        self, group: Mapping[str, Any], *, none_grads: str = "zero"
    ) -> Iterator[list[Batch]]:
        """Stacks a group's parameters of the same shape, type and device, and writes them back.

        Batches come in the order of their first parameters; gradients are off inside, and if the
        block raises, nothing is written. With ``none_grads="skip"`` parameters without a gradient
        take no part, as in torch's own optimizers; with ``"zero"`` their gradients are zeros.
        """
        check_choice("none_grads", none_grads, ("zero", "skip"))
        with torch.no_grad():
            batches = self._collect(group, none_grads)
            yield batches
            parts = [[local(p.detach()) for p in batch.params] for batch in batches]
            for batch, own in zip(batches, parts, strict=True):
                _check_rows("param", batch.param, (len(own), *own[0].shape))
                for name, value in batch.state.items():
                    _check_rows(f"state[{name!r}]", value, (len(own),))
            for batch, own in zip(batches, parts, strict=True):
                torch._foreach_copy_(own, list(batch.param.unbind()))
                self._store(batch)

    def _collect(self, group: Mapping[str, Any], none_grads: str) -> list[Batch]:
        kinds: dict[Any, list[tuple[str, Tensor, Tensor]]] = defaultdict(list)
        for name, p in zip(names_of(group), group["params"], strict=True):
            if none_grads == "zero" or p.grad is not None:
                part = local(p.detach())
                kinds[part.shape, part.dtype, part.device].append((name, p, part))
        batches = []
        for members in kinds.values():
            names, params, parts = zip(*members, strict=True)
            found = map(dense_gradient, params, names)
            grads = [
                torch.zeros_like(part) if g is None else local(aligned(g, p))
                for g, p, part in zip(found, params, parts, strict=True)
            ]
            has_grad = tuple(p.grad is not None for p in params)
            batch = Batch(torch.stack(parts), torch.stack(grads), {}, names, params, has_grad)
            states = [self.state[p] for p in batch.params]
            are_alike = states[0] and len({*map(frozenset, states)}) == 1
            initial = {} if are_alike else self.init_state(batch)
            for name in dict.fromkeys(chain(*states, initial)):
                rows = [
                    local(state[name]) if name in state else initial[name][i]
                    for i, state in enumerate(states)
                ]
                batch.state[name] = torch.stack(rows)
            batches.append(batch)
        return batches

    def _store(self, batch: Batch) -> None:
        for name, value in batch.state.items():
            for p, row in zip(batch.params, value.unbind(), strict=True):
                state, kept = self.state[p], self.state[p].get(name)
                if kept is not None and (local(kept).shape, kept.dtype) == (row.shape, row.dtype):
                    # Where the address stays, a captured CUDA graph stays right.
                    local(kept).copy_(row)
                else:
                    is_part = row.ndim and row.shape == local(p.detach()).shape
                    state[name] = as_shard(row.clone(), p, p.shape) if is_part else row.clone()

    @torch.no_grad()
    def _fill_state(self) -> None:
        for group in self.param_groups if self._allocates else ():
            if not all(self.state[p] for p in group["params"]):
                for batch in self._collect(group, none_grads="zero"):
                    self._store(batch)


def _check_rows(what: str, value: object, shape: tuple[int, ...]) -> None:
    found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
    if found[: len(shape)] != shape:
        raise InputError(
            f"Expected `{what}` of a batch to be a tensor whose shape begins with {shape}. Found "
            f"{found}. Remedy: a row for each parameter; what all share belongs into the group."
        )
