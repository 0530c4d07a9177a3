"""The graph between the output `y` and the losses: what it must be like, and its gradients.

These are had for each loss by itself, or at the node of a fork, where they meet.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from steadygrad._checks import InputError
from steadygrad._nests import tree_map_tensors, tree_tensors
from steadygrad.balance.norms import GradientRow
from steadygrad.balance.options import Options
from steadygrad.shards import is_sharded

__all__ = [
    "check_losses",
    "check_outputs",
    "eager",
    "fork",
    "item_count",
    "loss_gradients",
    "output_tensors",
]

P = ParamSpec("P")
R = TypeVar("R")
Edge = tuple[Node, int]
# Takes each loss's gradients of all outputs, an empty row for a loss without any.
Join = Callable[[list[GradientRow]], Sequence[Tensor | None]]


def output_tensors(y: object) -> list[Tensor]:
    """Collects the tensors of ``y`` that require a gradient, each once, in the nest's order."""
    tensors = tree_tensors(y, "parameter `y`")
    if not tensors:
        raise InputError(
            "Parameter `y` should hold a tensor that requires a gradient. Found none. Remedy: do "
            "not detach it."
        )
    for tensor in tensors:
        if is_sharded(tensor) or not tensor.is_floating_point():
            raise InputError(
                f"Parameter `y` should hold plain real tensors. Found a {type(tensor).__name__} of "
                f"{tensor.dtype}. Remedy: `y.full_tensor()`, or `torch.view_as_real(y)`."
            )
    return tensors


def item_count(outputs: Sequence[Tensor], options: Options) -> int:
    """Counts the items of a batch of outputs, with shapes ``(B, *)`` if the norm is of items."""
    sizes = {output.shape[:1] for output in outputs}
    by_item = options.per_batch_item or options.batch_independent
    if by_item and (len(sizes) > 1 or outputs[0].ndim == 0):
        raise InputError(
            "Parameter `y` should hold tensors with one common first dimension, the batch. Found "
            f"{[tuple(t.shape) for t in outputs]}. Remedy: neither `per_batch_item` nor "
            "`batch_independent`."
        )
    return outputs[0].shape[0] if outputs[0].ndim else 1


def check_outputs(outputs: Sequence[Tensor]) -> set[Node] | None:
    """Refuses outputs that another output is made from: they would count twice.

    Returns the nodes upstream of the outputs, or None if there was no need to look.
    """
    if len(outputs) < 2:
        return None
    ends = {get_gradient_edge(output).node for output in outputs}
    upstream = _upstream(ends, set())
    if not ends.isdisjoint(upstream):
        raise InputError(
            "Parameter `y` should hold tensors of which none is made from another, whose gradient "
            "would count twice. Remedy: `fork(y)`."
        )
    return upstream


def check_losses(
    losses: Mapping[str, Tensor], outputs: Sequence[Tensor], upstream: set[Node] | None
) -> dict[str, bool]:
    """Refuses losses whose gradient would be wrong or lost; ``upstream`` is of `check_outputs`.

    Returns for each loss whether a later one shares nodes of its graph.
    """
    edges = {_edge(output) for output in outputs}
    stops = {node for node, _ in edges}
    graphs: dict[str, set[Node]] = {}
    for name, loss in losses.items():
        nodes, reached = _between(loss, stops)
        if reached.isdisjoint(edges):
            raise InputError(
                f"Loss {name!r} should depend on `y`, the very tensor, outside of a compiled graph "
                "that makes both. Remedy: `fork(y)`, or add it outside of the balancer."
            )
        beside = not reached <= edges
        # Every path into the model ends at a leaf: a loss without one of its own has no other path.
        if not beside and any(not node.next_functions for node in nodes):
            upstream = _upstream(stops, set()) if upstream is None else upstream
            beside = not nodes.isdisjoint(upstream)
        if beside:
            raise InputError(
                f"Loss {name!r} should reach the model through `y` alone. Found another path, as "
                "by a shared weight, whose gradient would be lost. Remedy: `fork(y)`, or put what "
                "it takes into `y`, or detach it."
            )
        # Parameters' own nodes hold nothing that a first pass could free.
        graphs[name] = {node for node in nodes if node.next_functions}
    names = list(graphs)
    return {
        name: any(not graphs[name].isdisjoint(graphs[later]) for later in names[i + 1 :])
        for i, name in enumerate(names)
    }


def loss_gradients(
    losses: Mapping[str, Tensor],
    shared: Mapping[str, bool],
    outputs: Sequence[Tensor],
    *,
    retain_graph: bool,
) -> dict[str, GradientRow]:
    """Differentiates each loss by the outputs.

    Its graph is freed unless it is ``shared``, as :func:`check_losses` says, with a later one.
    """
    gradients: dict[str, GradientRow] = {}
    for name, loss in losses.items():
        keep = retain_graph or shared[name]
        with _without_hooks(outputs):
            gradients[name] = torch.autograd.grad(
                loss, outputs, retain_graph=keep, allow_unused=True
            )
    return gradients


@contextmanager
def _without_hooks(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Hides partial gradients from the outputs' own hooks, which see the balanced one.

    FSDP2 gathers parameters in such a hook: once for every loss, and for ever on a process that
    waits for one with fewer losses.
    """
    hooks = [output._backward_hooks or {} for output in outputs]
    kept = [dict(of_output) for of_output in hooks]
    retained = [(output, output.grad) for output in outputs if output.retains_grad]
    for of_output in hooks:
        of_output.clear()
    try:
        yield
    finally:
        for of_output, before in zip(hooks, kept, strict=True):
            of_output.update(before)
        for output, gradient in retained:
            output.grad = gradient


def _edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _between(loss: Tensor, stops: set[Node]) -> tuple[set[Node], set[Edge]]:
    """Finds the nodes between a loss and the outputs, and the edges that reach the outputs."""
    if not loss.requires_grad:
        return set(), set()
    start = _edge(loss)
    nodes = {start[0], *_upstream({start[0]} - stops, stops)} - stops
    followed = {edge for node in nodes for edge in node.next_functions} | {start}
    return nodes, {(node, number) for node, number in followed if node in stops}


def _upstream(nodes: set[Node], stops: set[Node]) -> set[Node]:
    """Finds all nodes that a backward pass reaches after ``nodes``, without going past ``stops``.

    One walk serves all outputs: a graph has no circles, so none is upstream of itself.
    """
    reached: set[Node] = set()
    stack = list(nodes)
    while stack:
        for node, _ in stack.pop().next_functions:
            if node is not None and node not in reached:
                reached.add(node)
                if node not in stops:
                    stack.append(node)
    return reached


def fork(join: Join, y: Any, outputs: Sequence[Tensor], names: Sequence[str]) -> dict[str, Any]:
    """Makes a nest like ``y`` for each name, with copies in place of ``outputs``, its tensors.

    ``join`` makes one gradient for each output out of those of all losses.
    """
    copies = iter(Fork.apply(join, len(names), *outputs))  # type: ignore[no-untyped-call]

    def branch() -> Any:
        copy_of = {id(output): next(copies) for output in outputs}
        return tree_map_tensors(lambda tensor: copy_of[id(tensor)], y, "parameter `y`")

    return {name: branch() for name in names}


class Fork(torch.autograd.Function):
    """Returns copies of tensors, and joins the gradients that come back.

    The engine runs a node when the gradients of all its outputs have arrived. So this backward
    sees every loss's gradient at once, within one ordinary pass, and passes on one gradient.
    """

    @staticmethod
    def forward(ctx: Any, join: Join, branches: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Returns views of all tensors for the first branch, then for the next."""
        ctx.set_materialize_grads(False)  # None tells a missing loss from one with zero gradient
        ctx.join, ctx.branches, ctx.joined = join, branches, False
        return tuple(tensor.view_as(tensor) for _ in range(branches) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        """Joins the gradients of all branches, once."""
        # Constant, and to be differentiated: the derivative of a copy, and of no loss.
        derivative = torch.is_grad_enabled() and not any(
            g is not None and g.requires_grad for g in gradients
        )
        if ctx.joined or derivative:
            found = "a copy's derivative" if derivative else "a second one, of some losses alone"
            raise InputError(
                f"Expected one backward pass through one `fork`. Found {found}. Remedy: "
                '`backward()` of the sum; `fork({"u": u, "u_xx": u_xx})`.'
            )
        return Fork._join(ctx, *gradients)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def _join(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        width = len(gradients) // ctx.branches
        rows = [list(gradients[i * width : (i + 1) * width]) for i in range(ctx.branches)]
        joined = ctx.join([row if any(g is not None for g in row) else [] for row in rows])
        ctx.joined = True
        return None, None, *joined


def eager(function: Callable[P, R]) -> Callable[P, R]:
    """Keeps a function out of compiled graphs, which end before the call and go on after it.

    What it does to buffers and process groups in a backward pass is no part of a graph.
    """

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            return function(*args, **kwargs)
        # Not at the top: it imports the compiler, which takes a second.
        return torch.compiler.disable(function)(*args, **kwargs)  # type: ignore[no-any-return]

    return call
