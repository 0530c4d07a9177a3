"""Notices parts of a step that are no micro-batches of one loss."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdRef

from steadygrad.noise.per_example import leave_alone

__all__ = ["Likeness", "Repeats"]

# Together they need 21 steps. A mean cosine of 0.1 is a hundredth of the parts' spread.
_SCORE, _COSINE = 4.5, 0.1

# A call of a layer: the layer, the layers of the parts that went through it, and, for the model's
# own call, the tensors it was given, each with its version.
_Call = tuple[nn.Module, set[nn.Module], tuple[tuple[WeakIdRef, int], ...]]


class Repeats:
    """Marks the calls of the model and of up to four layers that own measured parameters.

    Two losses of the same samples, each with a backward pass of its own, are no two micro-batches,
    and a penalty on the weights is none.

    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        owners = {p: module for module in model.modules() for p in module._parameters.values()}
        chosen = {owners[p]: p for p in parameters[:: -(-len(parameters) // 4)] if p in owners}
        self._model = model
        self._handles = [
            module.register_forward_hook(self, with_kwargs=True)
            for module in {**chosen, model: None}
            if not isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        ]
        self._seen = False
        self.turn()
        self.begin()

    def turn(self) -> None:
        """Begins a step."""
        self._given: set[tuple[tuple[WeakIdRef, int], ...]] = set()

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        # A copied or saved model is not measured.
        return partial, (leave_alone,)

    def begin(self, several: bool = False) -> None:
        """Begins a part, of one backward pass or of several."""
        self._several, self._task = several, -1
        self._calls: list[_Call] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Marks a call; not a checkpoint's second one, which is inside a backward pass."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn]
        if nodes and torch._C._current_graph_task_id() == -1:
            leaves = tree_leaves((args, kwargs)) if module is self._model else ()
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            given = ((WeakIdRef(x), -1 if x.is_inference() else x._version) for x in tensors)
            call: _Call = (module, set(), tuple(given))
            nodes[0].register_prehook(lambda _: self._pass(call))

    def _pass(self, call: _Call) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._several:
            self.begin()
        self._task = task
        self._calls.append(call)

    def end(self) -> str:
        """Ends a part; says what it is if it is no micro-batch of its own, else nothing.

        Its samples are an earlier part's if the model was given the same tensors, or if both went
        through one call, and this one through no layer of that part anew: what parts share may be
        a beginning that does not depend on samples.
        """
        calls = self._calls
        anew = {module for module, part, _ in calls if not part}
        repeated = any(part and not part & anew for _, part, _ in calls)
        for _, part, _ in calls:
            part.update(module for module, *_ in calls)
        given = {tensors for *_, tensors in calls if tensors}
        repeated |= not given.isdisjoint(self._given)
        self._given |= given
        alien, self._seen = self._seen and not calls, self._seen or bool(given)
        self.begin()
        if alien:
            return "one without a forward pass of the model, as of a penalty on its weights"
        return "a second one of the same samples, as of two losses" if repeated else ""

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()


class Likeness:
    r"""Compares the first part of each step with the last one of as many samples.

    Of independent samples either may as well come first, so their difference is as likely as its
    opposite, and its cosine :math:`c_t` with the sum of the earlier differences has a random sign.
    Then :math:`\sum c_t / \sqrt{\sum c_t^2}` passes 4.5 with a probability below
    :math:`e^{-4.5^2/2}`, whatever the gradients' distribution, and whether or not the weights
    move. Parts of one loss, one after the other, pass it soon.

    Args:
        turns: Number of sets of elements that are compared in turn.
        width: Number of elements in a set, at most.
        zero: A number of the type, and on the device, of all sums.

    Attributes:
        state: Sums of the unit differences of every set; below them number, sum and sum of squares
            of the cosines.

    References:
        | Student's t-Test under Symmetry Conditions (Efron, 1969)
        | https://doi.org/10.1080/01621459.1969.10501068
    """

    def __init__(self, turns: int, width: int, zero: Tensor) -> None:
        self.state = zero.new_zeros(turns + 1, max(width, 3))

    def note(self, turn: int, difference: Tensor) -> None:
        """Takes in one step's difference, with shape ``(n)``; zeros where there is none."""
        past, sums = self.state[turn, : len(difference)], self.state[-1]
        unit = (difference / difference.norm()).nan_to_num()
        cosine = (unit.dot(past) / past.norm()).nan_to_num()
        sums[:3] += torch.stack([(cosine != 0).to(cosine), cosine, cosine * cosine])
        past += unit

    @property
    def differ(self) -> Tensor:
        """Whether first and last parts differ systematically, boolean with shape ``()``."""
        count, total, squares = self.state[-1, :3]
        differ: Tensor = (total > _SCORE * squares.sqrt()) & (total > _COSINE * count)
        return differ
