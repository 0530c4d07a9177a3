"""Notices backward passes that are no micro-batch of samples of their own."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steadygrad.noise.example_taps import no_tap

__all__ = ["Repeats"]


class _Call(NamedTuple):
    """A layer's call, and the layers of the parts that went through it.

    The model's own call has the tensors it was given, each with its version.
    """

    module: nn.Module
    part: set[nn.Module]
    given: Sequence[tuple["weakref.ref[Tensor]", int]] = ()


class Repeats:
    """Hooks on the model and up to four layers that own measured parameters; they mark each call.

    Two losses of the same samples, each with a backward pass of its own, are no two micro-batches,
    and a penalty on the weights is none.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        owners = {p: module for module in model.modules() for p in module._parameters.values()}
        chosen = {owners[p]: p for p in parameters[:: -(-len(parameters) // 4)] if p in owners}
        eager = [module for module in chosen if not isinstance(module, torch.jit.ScriptModule)]
        self._handles = [module.register_forward_hook(self) for module in eager]
        if not isinstance(model, torch.jit.ScriptModule):
            self._handles.append(model.register_forward_hook(self, with_kwargs=True))
        self._seen = False
        self.turn()
        self.begin()

    def turn(self) -> None:
        """Begins a step."""
        self._given: list[Sequence[tuple[weakref.ref[Tensor], int]]] = []

    def __reduce__(self) -> tuple[Callable[[], object], tuple[()]]:
        # A copied or saved model is not measured.
        return no_tap, ()

    def begin(self, several: bool = False) -> None:
        """Begins a part, of one backward pass or of several."""
        self._several, self._task = several, -1
        self._calls: list[_Call] = []

    def __call__(self, module: nn.Module, args: Any, *rest: Any) -> None:
        """Marks a call; not a checkpoint's second one, which is inside a backward pass.

        ``rest`` is the output, and before it the keywords of a call of the model.
        """
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        *keywords, output = rest
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn]
        if nodes and torch._C._current_graph_task_id() == -1:
            leaves = tree_leaves((args, keywords)) if keywords else ()
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            given = [(weakref.ref(x), -1 if x.is_inference() else x._version) for x in tensors]
            call = _Call(module, set(), given)
            nodes[0].register_prehook(lambda _: self._pass(call))

    def _pass(self, call: _Call) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._several:
            self.begin()
        self._task = task
        self._calls.append(call)

    def end(self) -> str:
        """Ends a part; says what it is if it is no micro-batch of its own, else nothing.

        Its samples are an earlier part's if both went through one call, and this one through no
        layer of that part anew: what parts share may be a beginning that does not depend on
        samples. They are as well if the model was given the same tensors.
        """
        calls = self._calls
        anew = {call.module for call in calls if not call.part}
        repeated = any(call.part and not call.part & anew for call in calls)
        for call in calls:
            call.part.update(other.module for other in calls)
        given = [call.given for call in calls if call.given]
        repeated |= any(_same(these, those) for these in given for those in self._given)
        self._given += given
        alien, self._seen = self._seen and not calls, self._seen or bool(given)
        self.begin()
        if alien:
            return "one without a forward pass of the model, as of a penalty on its weights"
        return "a second one of the same samples, as of two losses" if repeated else ""

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


def _same(
    these: Sequence[tuple["weakref.ref[Tensor]", int]],
    those: Sequence[tuple["weakref.ref[Tensor]", int]],
) -> bool:
    """Whether two calls were given the same tensors, unchanged."""
    if len(these) != len(those):
        return False
    pairs = zip(these, those, strict=True)
    return all(a() is not None and a() is b() and m == n for (a, m), (b, n) in pairs)
