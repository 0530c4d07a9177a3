"""Notices backward passes over forward passes that an earlier part has been through."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steadygrad.noise.example_taps import no_tap

__all__ = ["Repeats"]


class _Call(NamedTuple):
    """A layer's call, and the layers of the parts that went through it."""

    module: nn.Module
    part: set[nn.Module]


class Repeats:
    """Hooks on up to four layers that own measured parameters; they mark each call's graph.

    Two losses of one forward pass, each with a backward pass of its own, are no two micro-batches.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        owners = {p: module for module in model.modules() for p in module._parameters.values()}
        chosen = {owners[p]: p for p in parameters[:: -(-len(parameters) // 4)] if p in owners}
        eager = [module for module in chosen if not isinstance(module, torch.jit.ScriptModule)]
        self._handles = [module.register_forward_hook(self) for module in eager]
        self.begin()

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # A copied or saved model is not measured.
        return no_tap, ()

    def begin(self, several: bool = False) -> None:
        """Begins a part, of one backward pass or of several."""
        self._several, self._task = several, -1
        self._calls: list[_Call] = []

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        """Marks a call; not a checkpoint's second one, which is inside a backward pass."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn]
        if nodes and torch._C._current_graph_task_id() == -1:
            call = _Call(module, set())
            nodes[0].register_prehook(lambda _: self._pass(call))

    def _pass(self, call: _Call) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._several:
            self.begin()
        self._task = task
        self._calls.append(call)

    def end(self) -> bool:
        """Ends a part; returns whether its samples are an earlier part's.

        They are if both went through one call, and this one through no layer of that part anew:
        what parts share may be a beginning that does not depend on samples.
        """
        calls = self._calls
        anew = {call.module for call in calls if not call.part}
        repeated = any(call.part and not call.part & anew for call in calls)
        for call in calls:
            call.part.update(other.module for other in calls)
        self.begin()
        return repeated

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
