"""Where the graph of a loss uses parameters: under which scale, and in which type.

Looked at in the first step only. What is not in the graph (compiled code, reentrant checkpoints,
parameters that a wrapper exchanges) stays unknown, and is trusted.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from steadygrad._checks import InputError
from steadygrad.scale.gradients import narrow
from steadygrad.scale.layers import Layers, plain_name
from steadygrad.scale.table import ScaleTable

__all__ = ["Usage"]

# In place of a layer: behind code whose graph cannot be seen.
_UNKNOWN = -1
# They hand a gradient on in another type or form, value by value.
_CASTS = {"ToCopyBackward0", "CopyBackwards", "CopySlices"}
_VIEWS = {
    f"{name}Backward0"
    for name in (
        *("Alias", "Clone", "Expand", "Permute", "Reshape", "ReshapeAlias", "Select", "Slice"),
        *("Squeeze", "T", "Transpose", "Unsqueeze", "UnsafeView", "View"),
    )
}


@dataclass
class _Found:
    """What a graph showed.

    Attributes:
        uses: By the identity of a leaf: the layers in which its gradient arises, and whether it
            may have been of a narrow type just before.
        strays: Layers by their boundaries and where these were met, if that is elsewhere.
    """

    uses: dict[int, set[tuple[int, bool]]] = field(default_factory=dict)
    strays: set[tuple[int, int]] = field(default_factory=set)


class Usage:
    """Looks at the losses of the first step, and again when the model's parameters are others.

    Args:
        layers: The layers.
        table: Their scales.
        auto: Whether the scales follow what is measured.

    Attributes:
        left_out: Indices of layers that share the scale of what lies around them.
    """

    def __init__(self, layers: Layers, table: ScaleTable, auto: bool) -> None:
        self._layers, self._table, self._auto = layers, table, auto
        self.left_out: set[int] = set()
        self.forget()

    def forget(self) -> None:
        """Looks again in the step to come."""
        self._version: int | None = None
        self._looked: int | None = None
        self._wide: dict[int, bool] = {}

    def done(self) -> None:
        """The step is over: enough was seen."""
        self._version = self._looked

    def lossy(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradient is, or may have been, of a type narrower than float32."""
        gradient = parameter.grad
        return (
            narrow(parameter.dtype)
            or (gradient is not None and narrow(gradient.dtype))
            or not self._wide.get(id(parameter), False)
        )

    def look(self, loss: Tensor) -> None:
        """Looks at the graph of a loss, if that is still to be done.

        Args:
            loss: With the graph that its backward pass will take.

        Raises:
            InputError: If a scale would not be taken out of a gradient as it came in.
        """
        if torch.compiler.is_compiling():
            return
        chosen = len(self._layers.layers) > 1
        if self._version == self._layers.version or not (chosen or self._table.measuring):
            return
        owners = self._layers.owners()
        self._looked = self._layers.version
        found = _walk(loss, {id(flag): i for i, flag in enumerate(self._table.flags)})
        strays = dict.fromkeys(sorted(found.strays), "")
        for leaf, uses in found.uses.items():
            if leaf in owners:
                wide = not any(may_be_narrow for _, may_be_narrow in uses)
                self._wide[leaf] = wide and self._wide.get(leaf, True)
                for met in {met for met, _ in uses} - {owners[leaf], _UNKNOWN}:
                    strays[owners[leaf], met] = self._name_of(leaf)
        if strays:
            self._settle(strays)

    def _settle(self, strays: Mapping[tuple[int, int], str]) -> None:
        """Leaves out the layers that are at rest at a scale of one, and refuses the others."""
        own = self._table.own.tolist()
        new = set()
        for (owner, met), name in strays.items():
            for index in set(self._layers.chain(owner)) ^ set(self._layers.chain(met)):
                rule = self._table.rules[index]
                rests = rule.growth_factor == rule.backoff_factor == 1.0 or self._auto
                if own[index] != 1.0 or not (rests and rule.min_scale <= 1.0 <= rule.max_scale):
                    raise self._refusal(owner, met, index, name)
                new.add(index)
        if not new <= self.left_out:
            self.left_out |= new
            self._table.leave_out(self.left_out, self._layers)

    def _refusal(self, owner: int, met: int, index: int, name: str) -> InputError:
        names = self._table.names
        what = repr(name) if name else "a value"
        mine = f"the chosen {names[owner]!r}" if owner else "no chosen module"
        other = f"in the chosen {names[met]!r}" if met else "outside of all of them"
        remedy = (
            f"scale=1.0, which leaves {names[index]!r} out, or layers without it"
            if self._auto
            else f"leave {names[index]!r} out of layer_scales, or choose a module around all uses"
        )
        return InputError(
            "Expected what lies in a chosen module to be used by calling it, and nothing else. "
            f"Found {what} that is of {mine} and is also used {other}, as tied weights, a "
            "penalty on weights or a value kept from inside are: no divisor gives its gradient "
            f"back. Remedy: {remedy}."
        )

    def _name_of(self, leaf: int) -> str:
        named = self._layers.model.named_parameters(remove_duplicate=False)
        return next((plain_name(name) for name, found in named if id(found) == leaf), "")


def _walk(loss: Tensor, flags: Mapping[int, int]) -> _Found:
    found = _Found()
    start = (loss.grad_fn, 0, False)
    seen, left = {start}, [start]
    while left:
        node, layer, passed = left.pop()
        if node is None:
            continue
        if hasattr(node, "variable"):
            found.uses.setdefault(id(node.variable), set()).add((layer, passed))
            continue
        layer, passed = _through(node, layer, passed, flags, found)
        for following, _ in node.next_functions:
            step = (following, layer, passed)
            # The set keeps the nodes alive too: what is freed could come back as another one.
            if step not in seen:
                seen.add(step)
                left.append(step)
    return found


def _through(
    node: Any, layer: int, passed: bool, flags: Mapping[int, int], found: _Found
) -> tuple[int, bool]:
    """In which layer one is behind a node, and whether the gradient there may have been narrow."""
    if isinstance(node, BackwardCFunction):
        into = getattr(node, "into_layer", None)
        if into is None:
            # It may hold boundaries, as compiled code and reentrant checkpoints do.
            return _UNKNOWN, True
        mine = next((flags[leaf] for leaf in _leaves(node) if leaf in flags), None)
        if mine is None:
            return layer, passed  # another scaler's
        if layer not in (mine, _UNKNOWN):
            found.strays.add((mine, layer))
        return into, passed
    name = node.name()
    if name in _CASTS:
        return layer, passed or _comes_narrow(node)
    return layer, passed and name in _VIEWS


def _comes_narrow(node: Any) -> bool:
    metadata = getattr(node, "_input_metadata", None)
    return metadata is None or any(narrow(entry.dtype) for entry in metadata)


def _leaves(node: Any) -> Iterator[int]:
    for following, _ in node.next_functions:
        if hasattr(following, "variable"):
            yield id(following.variable)
