"""Detects where backward passes begin and end, from inside hooks of gradients."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from steadygrad._checks import InputError

__all__ = ["PassBorders"]


class PassBorders:
    """Finds the borders of backward passes, without a context around them.

    Autograd gives every pass a number and calls back at its end. A pass that ended in an error has
    no callback: the next pass finds it still open.

    Args:
        begin: Called at a pass's first gradient; returns whether the pass is measured.
        end: Called when a measured pass is over, its gradients accumulated.
        fail: Called when a measured pass turns out to have ended in an error.
    """

    def __init__(
        self, begin: Callable[[], bool], end: Callable[[], None], fail: Callable[[], None]
    ) -> None:
        self._begin, self._end, self._fail = begin, end, fail
        self._number = self._asked = -1
        self._measured = self._accumulates = False

    def accumulates(self, leaf: Tensor) -> bool:
        """Whether the pass that runs now adds to ``.grad``, which ``torch.autograd.grad`` does not.

        Args:
            leaf: The parameter whose gradient has just arrived.
        """
        number = torch._C._current_graph_task_id()
        if number != self._asked:
            self._asked, self._accumulates = number, _adds_to_grad(leaf)
        return self._accumulates

    def measured(self, leaf: Tensor) -> bool:
        """Whether the gradient that arrives now is of a measured pass; to be called by its hook.

        Raises:
            InputError: If that pass began inside another one, so that its end is not known.
        """
        number = torch._C._current_graph_task_id()
        if number != self._number:
            if not self.accumulates(leaf):
                return False
            self._enter(number)
        return self._measured

    def finish(self) -> None:
        """Forgets a pass that should be over by now."""
        measured, self._measured, self._number = self._measured, False, -1
        if measured:
            self._fail()

    def _enter(self, number: int) -> None:
        nested = _inside_a_backward_function()
        if nested and self._measured:
            return  # a reentrant checkpoint, whose gradients are of the pass around it
        self.finish()
        if not self._begin():
            self._number = number
            return
        self._measured, self._number = True, number
        if nested:
            raise InputError(
                "Expected backward passes whose first gradient of a parameter arises outside of "
                "reentrant checkpoints. Found one inside, where the end of the whole pass is not "
                "known. Remedy: checkpoint(..., use_reentrant=False), or a `with "
                "noise.microbatch(n)` around the pass."
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._close)

    @torch.no_grad()
    def _close(self) -> None:
        self._measured, self._number = False, -1
        self._end()


def _adds_to_grad(leaf: Tensor) -> bool:
    # Not kept: the engine remembers the stream on which this node was made.
    with torch.enable_grad():
        view: Any = leaf.view_as(leaf)
    try:
        return bool(torch._C._will_engine_execute_node(view.grad_fn.next_functions[0][0]))
    except RuntimeError as error:
        # The engine refuses to say it of leaves whose gradients it hands to the caller.
        if "autograd.grad" in str(error):
            return False
        raise


def _inside_a_backward_function() -> bool:
    """Whether a Python function's backward has begun the backward pass that runs now."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is BackwardCFunction.apply.__code__:
            return True
        frame = frame.f_back
    return False
