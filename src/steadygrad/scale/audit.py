"""Checks on the first step's graphs that gradients are divided by the scales they carry.

What is not in a graph (compiled code, reentrant checkpoints, parameters that a wrapper replaces)
stays unknown, and is trusted.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.utils.weak import WeakTensorKeyDictionary

from steadygrad._checks import InputError
from steadygrad._names import plain_name
from steadygrad.scale.equations import is_narrow
from steadygrad.scale.layers import LOSS, Layers
from steadygrad.scale.table import ScaleTable

# In place of a layer's index: behind code whose graph cannot be seen.
_UNKNOWN = -1


class GraphAudit:
    """Audits the first step's graphs, and again ones of exchanged parameters."""

    def __init__(self, layers: Layers, table: ScaleTable, auto: bool) -> None:
        self._layers, self._table, self._auto = layers, table, auto
        # Versions of the layers: at the last audit, and at the last step that was audited whole.
        self._seen = self._done = -1
        # Whether a parameter's gradient was float32 at least on all ways that were seen.
        self._stayed_wide = WeakTensorKeyDictionary()

    def end_step(self) -> None:
        """Ends the audit of this step's losses."""
        self._done = self._seen

    def may_be_narrow(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Tells whether a parameter's gradient is, or was, of a type narrower than float32."""
        stayed_wide = self._stayed_wide.get(parameter, False)
        return not stayed_wide or is_narrow(parameter.dtype) or is_narrow(gradient.dtype)

    def inspect(self, loss: Tensor) -> None:
        """Refuses a loss of which a gradient gets around a boundary, unless the scale stays one."""
        needed = len(self._layers.names) > 1 or self._table.measuring
        if torch.compiler.is_compiling() or self._done == self._layers.version or not needed:
            return
        uses, crossed = _walk(loss, self._table)
        owners = self._layers.layers_of(list(uses))
        self._seen = self._layers.version
        for (leaf, met), owner in zip(uses.items(), owners, strict=True):
            if owner is not None:
                wide = not any(narrow for _, narrow in met)
                self._stayed_wide[leaf] = wide and self._stayed_wide.get(leaf, True)
                for layer in {layer for layer, _ in met} - {owner, _UNKNOWN}:
                    self._check_bypass(owner, layer, leaf)
        for pair in sorted(crossed):
            self._check_bypass(*pair)

    def _check_bypass(self, owner: int, met: int, leaf: Tensor | None = None) -> None:
        layers, table, scales = self._layers, self._table, self._table.scales.tolist()
        around = {*layers.chains[owner]} ^ {*layers.chains[met]}
        # A scale of one needs no boundary, and is fixed.
        may_stay = {i for i in around if scales[i] == 1.0 and (self._auto or i in table.fixed)}
        table.fix(may_stay)
        for bypassed in sorted(around - may_stay):
            named = layers.model.named_parameters()
            name = next((plain_name(n) for n, parameter in named if parameter is leaf), "")
            raise InputError(
                f"Expected chosen modules to be used by calling them. Found {name or 'a value'!r} "
                f"of {layers.described([owner])}, also used in {layers.described([met])}, as tied "
                "weights, penalties on weights and values kept from inside are: no divisor removes "
                f"the scales from its gradient. Remedy: leave {layers.names[bypassed]!r} out of "
                "layer_scales, or choose a module around all uses."
            )

    def uncalled(self, gradients: Iterable[tuple[int, Tensor]]) -> InputError | None:
        """Returns the error for a layer that has gradients but was never called.

        These crossed no boundary, and to divide them would be wrong. Waits for the device only
        where a layer was not called: wrappers give zeros to layers that took no part.
        """
        layers = self._layers
        for layer, gradient in gradients:
            uncalled = {*layers.chains[layer]} - self._table.called
            if uncalled and bool(gradient.any()):
                return InputError(
                    f"Expected chosen modules to be called. Found {layers.names[max(uncalled)]!r} "
                    "never called since the scaler was built, though its parameters have "
                    "gradients. Remedy: choose the module that uses them; for code compiled "
                    "before, torch.compiler.reset()."
                )
        return None


def _walk(
    loss: Tensor, table: ScaleTable
) -> tuple[dict[Tensor, set[tuple[int, bool]]], set[tuple[int, int]]]:
    """Follows a graph from the loss to its leaves.

    Returns:
        For each leaf the layers in which its gradient arises, and whether it may have been narrow
        just before; and pairs of a boundary's layer and another one where it was met.
    """
    uses: dict[Tensor, set[tuple[int, bool]]] = {}
    bypasses: set[tuple[int, int]] = set()
    stack: list[Any] = [] if loss.grad_fn is None else [(loss.grad_fn, LOSS, False)]
    # The set keeps the nodes alive too: the id of one that is freed could be given to another one.
    seen = {*stack}
    while stack:
        node, layer, was_narrow = stack.pop()
        if hasattr(node, "variable"):
            uses.setdefault(node.variable, set()).add((layer, was_narrow))
            continue
        edges = [edge for edge in node.next_functions if edge[0] is not None]
        in_python = isinstance(node, BackwardCFunction)
        if in_python and not hasattr(node, "scale_path"):
            # It may hold boundaries, as compiled code and reentrant checkpoints do.
            layer, was_narrow = _UNKNOWN, True
        elif in_python and node.table is table:
            if layer not in (node.scale_path.out_of, _UNKNOWN):
                bypasses.add((node.scale_path.out_of, layer))
            layer = node.scale_path.into
        taken = [] if in_python else _gradient_metadata(node)
        was_narrow |= any(entry is None or is_narrow(entry.dtype) for entry in taken)
        for following, number in edges:
            keeps = in_python or (len(edges) == 1 and _keeps_elements(node, following, number))
            step = following, layer, keeps and was_narrow
            if step not in seen:
                seen.add(step)
                stack.append(step)
    return uses, bypasses


def _keeps_elements(node: Any, following: Any, number: int) -> bool:
    """Tells whether a node may be a cast or a view: it returns as many numbers as it takes."""
    taken, given = _gradient_metadata(node), _gradient_metadata(following)
    one, other = taken[0], given[number] if number < len(given) else None
    if one is None or other is None or one.is_nested_tensor or other.is_nested_tensor:
        return True
    return bool(math.prod(one.shape) == math.prod(other.shape))


def _gradient_metadata(node: Any) -> Any:
    """Lists types and shapes of the gradients that a node takes; ``[None]`` if unknown."""
    return getattr(node, "_input_metadata", None) or [None]
