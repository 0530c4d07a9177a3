"""Checks on the first step's graphs that gradients are divided by the scales they carry.

What is not in a graph (compiled code, reentrant checkpoints, parameters that a wrapper replaces)
stays unknown, and is trusted.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from steadygrad._checks import InputError
from steadygrad._names import plain_name
from steadygrad.scale.layers import Layers
from steadygrad.scale.table import ScaleTable

__all__ = ["GraphAudit", "is_narrow"]

# In place of a layer's index: behind code whose graph cannot be seen.
_UNKNOWN = -1


def is_narrow(dtype: torch.dtype) -> bool:
    """Tells whether a floating type holds less than float32 does."""
    return dtype.itemsize < torch.float32.itemsize


class GraphAudit:
    """Audits the graphs of the first step's losses, and again after parameters were exchanged.

    Args:
        layers: The layers.
        table: Scales of the layers.
        auto: Whether the scales follow measured exponents.
    """

    def __init__(self, layers: Layers, table: ScaleTable, auto: bool) -> None:
        self._layers, self._table, self._auto = layers, table, auto
        self.reset()

    def reset(self) -> None:
        """Forgets all audits; the next step is audited again."""
        # Versions of the layers: at the last audit, and at the last step that was audited whole.
        self._seen: int | None = None
        self._done: int | None = None
        # By the parameters' ids, which hold for that version alone.
        self._stayed_wide: dict[int, bool] = {}

    def end_step(self) -> None:
        """Ends the audit of this step's losses."""
        self._done = self._seen

    def may_be_narrow(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Tells whether a parameter's gradient is, or was, of a type narrower than float32."""
        known = self._seen == self._layers.version
        wide = known and self._stayed_wide.get(id(parameter), False)
        return not wide or is_narrow(parameter.dtype) or is_narrow(gradient.dtype)

    def inspect(self, loss: Tensor) -> None:
        """Audits the graph of a loss, if that is still to be done.

        Raises:
            InputError: If a gradient gets around a boundary whose scale is not one.
        """
        if torch.compiler.is_compiling() or self._done == self._layers.version:
            return
        if len(self._layers.layers) == 1 and not self._table.measuring:
            return
        uses, crossed = _walk(loss, self._table)
        owners = self._layers.owners(list(uses))
        if self._seen != self._layers.version:
            self._seen, self._stayed_wide = self._layers.version, {}
        bypasses: dict[tuple[int, int], Tensor | None] = dict.fromkeys(sorted(crossed))
        for (leaf, met), owner in zip(uses.items(), owners, strict=True):
            if owner is not None:
                wide = not any(narrow for _, narrow in met)
                self._stayed_wide[id(leaf)] = wide and self._stayed_wide.get(id(leaf), True)
                for layer in {layer for layer, _ in met} - {owner, _UNKNOWN}:
                    bypasses[owner, layer] = leaf
        if bypasses:
            self._merge_or_refuse(bypasses)

    def _merge_or_refuse(self, bypasses: Mapping[tuple[int, int], Tensor | None]) -> None:
        """Merges bypassed layers into the layers around them, if their scales stay one."""
        own = self._table.own.tolist()
        merged = set()
        for (owner, met), leaf in bypasses.items():
            for index in {*self._layers.chain(owner)} ^ {*self._layers.chain(met)}:
                if own[index] != 1.0 or not self._table.rules[index].may_rest_at_one(self._auto):
                    raise self._bypassed(owner, met, index, leaf)
                merged.add(index)
        if not merged <= self._table.merged:
            self._table.merge(merged)

    def _bypassed(self, owner: int, met: int, index: int, leaf: Tensor | None) -> InputError:
        named = self._layers.model.named_parameters(remove_duplicate=False)
        name = next((plain_name(n) for n, parameter in named if parameter is leaf), "")
        bypassed = repr(self._table.names[index])
        other = f"in {self._layers.described(met)}" if met else "outside of all of them"
        remedy = (
            f"scale=1.0, which leaves {bypassed} out, or layers without it"
            if self._auto
            else f"leave {bypassed} out of layer_scales, or choose a module around all uses"
        )
        return InputError(
            "Expected what lies in a chosen module to be used by calling it, and nothing else. "
            f"Found {repr(name) if name else 'a value'} that is of {self._layers.described(owner)} "
            f"and is also used {other}, as tied weights, a penalty on weights or a value kept from "
            "inside are: no single divisor removes the scales from its gradient. "
            f"Remedy: {remedy}."
        )

    def uncalled(self, gradients: Mapping[int, Collection[Tensor]]) -> InputError | None:
        """Returns the error for a layer that has gradients but was never called.

        These crossed no boundary, and to divide them would be wrong. Waits for the device only
        where a layer was not called: wrappers give zeros to layers that took no part.
        """
        for index, tensors in gradients.items():
            uncalled = [i for i in self._layers.chain(index) if i not in self._table.called]
            if uncalled and any(bool(tensor.any()) for tensor in tensors):
                return InputError(
                    f"Expected chosen modules to be called. Found "
                    f"{self._table.names[uncalled[0]]!r} never called since the scaler was built, "
                    "though its parameters have gradients. Remedy: choose the module that uses "
                    "them; in compiled code, call torch.compiler.reset() when the scaler is built, "
                    "for hooks that come later than the compiler are not seen."
                )
        return None


def _walk(
    loss: Tensor, table: ScaleTable
) -> tuple[dict[Tensor, set[tuple[int, bool]]], set[tuple[int, int]]]:
    """Follows a graph from the loss to its leaves.

    Returns:
        For each leaf the layers in which its gradient arises, and whether it may have been of a
        narrow type just before; and pairs of a boundary's layer and another one where it was met.
    """
    uses: dict[Tensor, set[tuple[int, bool]]] = {}
    bypasses: set[tuple[int, int]] = set()
    stack: list[Any] = [] if loss.grad_fn is None else [(loss.grad_fn, 0, False)]
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
