"""Checks of the output `y` and of autograd graphs, before anything is computed."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from steadygrad._checks import InputError
from steadygrad._nests import tree_tensors
from steadygrad.balance.loss_context import BalancerOptions
from steadygrad.shards import is_sharded

__all__ = ["check_losses", "check_outputs", "independent", "item_count", "output_tensors"]

Edge = tuple[Node, int]


def output_tensors(y: Any) -> list[Tensor]:
    """Collects the tensors of ``y`` that require a gradient, each once, in the nest's order.

    Raises:
        InputError: If there is none, one is complex or sharded, or some are in an object that
            cannot be taken apart.
    """
    tensors = tree_tensors(y, "parameter `y`")
    if not tensors:
        raise InputError(
            "Parameter `y` should hold a tensor that requires a gradient. Found none. Remedy: "
            "hand in the model's output as the losses see it: not detached, not made under "
            "`torch.no_grad()`."
        )
    for tensor in tensors:
        if is_sharded(tensor):
            raise InputError(
                "Parameter `y` should hold plain tensors. Found a DTensor. "
                "Remedy: `y.to_local()` or `y.full_tensor()` before the losses."
            )
        if not tensor.is_floating_point():
            raise InputError(
                f"Parameter `y` should hold real tensors. Found one of {tensor.dtype}. "
                "Remedy: `torch.view_as_real(y)` before the losses."
            )
    return tensors


def item_count(outputs: Sequence[Tensor], options: BalancerOptions) -> int:
    """Counts the items of a batch of outputs with shapes ``(B, *)``.

    Raises:
        InputError: If the norm depends on items, and the first dimensions differ.
    """
    sizes = {output.shape[0] if output.ndim else None for output in outputs}
    if len(sizes) == 1 and None not in sizes:
        return outputs[0].shape[0]
    if options.per_batch_item or options.batch_independent:
        raise InputError(
            "Parameter `y` should hold tensors with one common first dimension, the batch. Found "
            f"shapes {[tuple(t.shape) for t in outputs]}. Remedy: per_batch_item=False, and "
            "no batch_independent=True."
        )
    return outputs[0].shape[0] if outputs[0].ndim else 1


def check_outputs(outputs: Sequence[Tensor], heads: Sequence[Tensor]) -> set[Node] | None:
    """Refuses outputs and head parameters that an output is made from: they would count twice.

    Returns:
        The nodes upstream of the outputs, or None if there was no need to look.
    """
    if len(outputs) < 2 and not heads:
        return None
    ends = {get_gradient_edge(output).node for output in outputs}
    upstream = _behind(ends)
    if not ends.isdisjoint(upstream):
        raise InputError(
            "Parameter `y` should hold tensors of which none is made from another. Found one "
            "upstream of another, whose gradient would be counted twice. Remedy: `fork(y)`, "
            "with the rest of the model fed from the tensor itself and not from a branch."
        )
    shared = [tuple(p.shape) for p in heads if get_gradient_edge(p).node in upstream | ends]
    if shared:
        raise InputError(
            "Parameter `head_parameters` should hold parameters between `y` and the losses. Found "
            f"{len(shared)} of {len(heads)} that `y` is made from, the first of shape {shared[0]}: "
            "the whole model, or a weight that a head shares with it. Remedy: the heads' alone, "
            "such as `model.head.parameters()`; with shared weights, `fork(y)`."
        )
    return upstream


def check_losses(
    losses: Mapping[str, Tensor], outputs: Sequence[Tensor], upstream: set[Node] | None = None
) -> dict[str, int]:
    """Refuses losses whose gradient would be wrong or lost; ``upstream`` is of `check_outputs`.

    Returns:
        For each loss, how many of the later ones share nodes of its graph.

    Raises:
        InputError: If a loss is no scalar, does not depend on the outputs, reaches the model
            beside them, or goes through a reentrant checkpoint.
    """
    edges = {_edge(output) for output in outputs}
    stops = {node for node, _ in edges}
    graphs: dict[str, set[Node]] = {}
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"Loss {name!r} should be a tensor with one real number. Found {shape}. "
                "Remedy: `loss.mean()`, or None where it is missing in a step."
            )
        nodes, reached = _above(loss, stops)
        if reached.isdisjoint(edges):
            compiled = any(node.name().startswith("CompiledFunction") for node, _ in reached)
            raise _one_compiled(name) if compiled else independent(name)
        if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
            raise InputError(
                f"Loss {name!r} should have a graph that can be differentiated by parts. Found a "
                "reentrant checkpoint in it. Remedy: checkpoint(..., use_reentrant=False), or "
                "`fork(y)` and an ordinary backward."
            )
        if not reached <= edges:
            raise _beside(name)
        # Every path into the model ends at a leaf: a loss without one of its own has no other path.
        if any(not node.next_functions for node in nodes):
            upstream = _behind(stops) if upstream is None else upstream
            if not nodes.isdisjoint(upstream):
                raise _beside(name)
        # Parameters' own nodes hold nothing that a first pass could free.
        graphs[name] = {node for node in nodes if node.next_functions}
    names = list(graphs)
    return {
        name: sum(not graphs[name].isdisjoint(graphs[other]) for other in names[i + 1 :])
        for i, name in enumerate(names)
    }


def independent(name: str) -> InputError:
    """Makes the error for a loss that does not depend on the outputs."""
    return InputError(
        f"Loss {name!r} should depend on `y`. Found a graph in which it does not. Remedy: compute "
        "it from the very tensor handed in as `y`, not from a copy, a detached tensor or another "
        "output; add losses of other things to the total outside of the balancer."
    )


def _beside(name: str) -> InputError:
    return InputError(
        f"Loss {name!r} should reach the model through `y` alone. Found that it also depends on a "
        "weight of the model, on a tensor upstream of `y` or on another output of the model, whose "
        "gradient would be lost. Remedy: `fork(y)` and an ordinary backward, which carries both; "
        "or put it into `y`, or detach it."
    )


def _one_compiled(name: str) -> InputError:
    return InputError(
        f"Loss {name!r} should be computed from `y` in a graph of its own. Found one compiled "
        "graph that returns both, in which nothing tells how the loss depends on `y`. Remedy: "
        "return `y` from the compiled model, and compute the losses outside or in another compiled "
        "function; or call `fork(y)` in between."
    )


def _edge(tensor: Tensor) -> Edge:
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _above(loss: Tensor, stops: set[Node]) -> tuple[set[Node], set[Edge]]:
    """Finds the nodes between a loss and the outputs, and the edges that reach the outputs."""
    if not loss.requires_grad:
        return set(), set()
    start = _edge(loss)
    nodes = _upstream([start[0]], stops) - stops
    followed = {edge for node in nodes for edge in node.next_functions} | {start}
    return nodes, {(n, number) for n, number in followed if n is not None and n in stops}


def _behind(ends: set[Node]) -> set[Node]:
    """Finds the nodes upstream of the outputs."""
    starts = [after for end in ends for after, _ in end.next_functions if after is not None]
    # One walk for all outputs: a graph has no circles, so no output is upstream of itself.
    return _upstream(starts, set())


def _upstream(stack: list[Node], stops: set[Node]) -> set[Node]:
    """Finds all nodes that a backward pass from ``stack`` reaches, without going past ``stops``."""
    reached: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in reached:
            reached.add(node)
            if node not in stops:
                stack += [after for after, _ in node.next_functions if after is not None]
    return reached
