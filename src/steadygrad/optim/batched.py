"""A base class for optimizers that work on same-shape parameters stacked into one tensor."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from steadygrad._checks import InputError, check_choice
from steadygrad.optim.checks import dense_gradient
from steadygrad.optim.loading import TypeKeepingOptimizer, names_of
from steadygrad.optim.stacks import (
    Batch,
    BatchState,
    check_result,
    common_stack,
    kind_of,
    laid_out_as,
)
from steadygrad.shards import aligned, local

__all__ = ["Batch", "BatchState", "BatchedOptimizer"]


class BatchedOptimizer(TypeKeepingOptimizer):
    """Base class for your own optimizer, when a model has many parameters of few shapes.

    A subclass writes its rule once, for a stack of parameters with a leading dimension ``n``, and
    a model of hundreds of tensors takes a few kernels a step instead of hundreds. This is a way
    to compute only: state is kept for each parameter, as views of one stacked tensor, so that
    ``state_dict``, torch.distributed.checkpoint, ``add_param_group`` and ``deepcopy`` work as with
    any torch optimizer. ``deepcopy`` keeps no attributes of an optimizer, so put options into the
    groups. Where views no longer lie in one stack, after a load for example, they are stacked once
    more.

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
                            velocity = batch.state["velocity"]  # [n, *shape], a view of the state
                            velocity.mul_(group["momentum"]).add_(batch.grad)
                            batch.param.sub_(group["lr"] * velocity)
                return loss

    A norm for each parameter is one over all dimensions but the first. Counters that all
    parameters share are best kept in the group, those of single parameters as state with shape
    ``[n]``.

    **None gradients** count as zeros unless ``batched_params`` skips them; zeros still
    decay averages and, with momentum, still move a parameter, which torch's own optimizers do not.

    **Sharded parameters** (DTensors) are batched by the shapes of this process's parts, and state
    of that shape becomes a DTensor of the same layout. Rules that go by element are exact; a norm
    is that of the local part only, and nothing is summed over processes for you.

    State keeps its own type through ``load_state_dict``, where torch casts it to the parameter's.

    Args:
        params: Parameters, named parameters, or groups of either; real and dense.
        defaults: Options of a group that does not have its own.

    References:
        | BatchedOptimizer in icefall's ``optim.py``, by Daniel Povey (2022)
        | https://github.com/k2-fsa/icefall
    """

    _allocates = False

    def init_state(self, batch: Batch) -> Mapping[str, Tensor]:
        """State of parameters that have none yet; a subclass defines it.

        Called before a batch is handed out when any of its members lacks state. Members that have
        a state keep it, so every row must depend on its own parameter only.

        Args:
            batch: The whole batch.

        Returns:
            Tensors whose first dimension is ``len(batch)``, by name. Names that some members have
            and others have not must be among them.
        """
        return {}

    def allocate_state(self) -> None:
        """Makes the state of every parameter now; call it at the end of your ``__init__``.

        Checkpoints are then the same before the first step as after it, also those of groups added
        later. Without this call, state is made as parameters are first batched.
        """
        self._allocates = True
        for group in self.param_groups:
            self._make_state(group)

    @contextmanager
    def batched_params(
        self, group: Mapping[str, Any], *, none_grads: str = "zero"
    ) -> Iterator[list[Batch]]:
        """Stacks a group's parameters of the same shape, type and device, and writes them back.

        On leaving, the stacked parameters and the state that was assigned are written to the
        parameters. If the block raises, neither is. What was changed *in place* in state the
        optimizer already had is changed at once, as the stack is that state: compute into a new
        tensor and assign it where that matters. Gradients are off inside.

        Args:
            group: One of ``self.param_groups``.
            none_grads: ``"zero"``: None gradients are zeros. ``"skip"``: their parameters take no
                part, as in torch's own optimizers. State is stacked again whenever the ones that
                take part change, so choose this for gradients that are seldom None, or always.

        Yields:
            The batches, in the order of their first parameters.

        Raises:
            InputError: If a gradient is sparse, or only a part of a batch has a state that
                ``init_state`` says nothing of.
        """
        check_choice("none_grads", none_grads, ("zero", "skip"))
        with torch.no_grad():
            batches = self._collect(group, none_grads)
            try:
                for batch in batches:
                    batch.state.fill = partial(self._late_state, batch)
                yield batches
            finally:
                for batch in batches:
                    # A cycle of references would hold the stacks' memory until it is found.
                    batch.state.fill = None
            for batch in batches:
                check_result(batch)
            # All taken out before any is stored: one may be another's stack (`previous = current`).
            assigned = [batch.state.pop_assigned(batches) for batch in batches]
            for batch, values in zip(batches, assigned, strict=True):
                torch._foreach_copy_(list(batch.parts), list(batch.param.unbind()))
                for name, value in values:
                    self._put(batch, name, value)

    def _collect(self, group: Mapping[str, Any], none_grads: str) -> list[Batch]:
        params: Sequence[Tensor] = group["params"]
        names = names_of(group)
        parts = [local(p.detach()) for p in params]
        kinds: dict[Any, list[int]] = {}
        for index, p in enumerate(params):
            if none_grads == "zero" or p.grad is not None:
                kinds.setdefault(kind_of(parts[index]), []).append(index)
        batches = []
        for indices in kinds.values():
            grads = [
                local(aligned(dense_gradient(params[i], names[i]), params[i])) for i in indices
            ]
            batch = Batch(
                param=torch.stack([parts[i] for i in indices]),
                grad=torch.stack(grads),
                state=BatchState({}, len(indices)),
                names=tuple(names[i] for i in indices),
                params=tuple(params[i] for i in indices),
                parts=tuple(parts[i] for i in indices),
                has_grad=tuple(params[i].grad is not None for i in indices),
            )
            self._attach_state(batch)
            batches.append(batch)
        return batches

    def _attach_state(self, batch: Batch) -> None:
        """Gives a batch the stacks of its members' states, new members' included."""
        kept = [
            {k: v for k, v in self.state.get(p, {}).items() if isinstance(v, Tensor)}
            for p in batch.params
        ]
        known = list(dict.fromkeys(name for state in kept for name in state))
        initial: Mapping[str, Tensor] = {}
        if not known or any(len(state) < len(known) for state in kept):
            initial = self._initial(batch)
        for name in dict.fromkeys([*known, *initial]):
            rows = [local(state[name]) if name in state else None for state in kept]
            batch.state.stacks[name] = self._stack(batch, name, rows, initial.get(name))

    def _initial(self, batch: Batch) -> dict[str, Tensor]:
        initial = dict(self.init_state(batch))
        for name, value in initial.items():
            batch.state.check(name, value)
        return initial

    def _stack(
        self, batch: Batch, name: str, rows: Sequence[Tensor | None], initial: Tensor | None
    ) -> Tensor:
        """One tensor of all members' rows of a state, which are views of it from then on."""
        if any(row is None for row in rows) and initial is None:
            without = [n for n, row in zip(batch.names, rows, strict=True) if row is None]
            raise InputError(
                f"Expected `init_state` to return {name!r}, which {without[0]!r} lacks and other "
                f"parameters of its batch have. Found none. Remedy: return {name!r} from "
                "`init_state`, or load a state that covers all parameters."
            )
        filled = [initial[i] if row is None else row for i, row in enumerate(rows)]  # type: ignore[index]
        kinds = {kind_of(row) for row in filled}
        if len(kinds) > 1:
            raise InputError(
                f"Expected state {name!r} to be of one shape, type and device over the batch of "
                f"{batch.names[0]!r}. Found {sorted(map(str, kinds))}. "
                "Remedy: assign it for whole batches only."
            )
        stack = common_stack(filled) if all(row is not None for row in rows) else None
        if stack is None:
            stack = torch.stack(filled)
            self._view(batch, name, stack)
        return stack

    def _late_state(self, batch: Batch, name: str) -> Tensor | None:
        """State that no member has, though they have others: an older version's, when loaded."""
        initial = self._initial(batch).get(name)
        return None if initial is None else self._stack(batch, name, [None] * len(batch), initial)

    def _put(self, batch: Batch, name: str, value: Tensor) -> None:
        """Stores an assigned state, in place where it fits."""
        stack = batch.state.stacks.get(name)
        if stack is value:
            return
        if stack is not None and kind_of(stack) == kind_of(value):
            # Where the addresses stay, a captured CUDA graph stays right.
            stack.copy_(value)
            return
        self._view(batch, name, value.detach().clone(memory_format=torch.contiguous_format))

    def _view(self, batch: Batch, name: str, stack: Tensor) -> None:
        """Makes each member's state a view of its row."""
        for p, row in zip(batch.params, stack.unbind(), strict=True):
            self.state[p][name] = laid_out_as(p, row)

    @torch.no_grad()
    def _make_state(self, group: Mapping[str, Any]) -> None:
        if self._allocates:
            self._collect(group, none_grads="zero")

    def _place(
        self, parameter: Tensor, group: Mapping[str, Any], name: str, value: Tensor
    ) -> Tensor:
        # As in torch, a counter stays on the host if it was there.
        device = value.device if name == "step" else parameter.device
        return value.detach().to(device, copy=True)
