"""Gradients of single losses, each through its own part of the graph only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, get_gradient_edge

from steadygrad._checks import InputError

__all__ = ["Heads", "Partials", "check_leaves", "check_losses", "parameters_of", "part_gradients"]


class Partials(NamedTuple):
    """Gradients of several losses.

    Attributes:
        outputs: For each loss the gradients of the model's outputs.
        heads: For each loss the gradients of the heads' parameters.
    """

    outputs: dict[str, list[Tensor | None]]
    heads: dict[str, list[Tensor | None]]


Heads = nn.Module | Tensor | Iterable["nn.Module | Tensor | tuple[str, Tensor]"]


def parameters_of(source: Heads) -> list[Tensor]:
    """The parameters that want a gradient, each once.

    Raises:
        InputError: If there is something else among them.
    """
    # A parameter shared by two heads must be asked for once.
    found = {id(p): p for p in _parameters(source) if p.requires_grad}
    for p in found.values():
        if not p.is_leaf:
            raise InputError(
                "Parameter `head_parameters` should hold parameters. Found a tensor of shape "
                f"{tuple(p.shape)} that was computed. Remedy: what it was computed from."
            )
    return list(found.values())


def _parameters(source: Any) -> Iterator[Tensor]:
    if isinstance(source, nn.Module):
        yield from source.parameters()
    elif isinstance(source, Tensor):
        yield source
    elif isinstance(source, Iterable) and not isinstance(source, (str, Mapping)):
        for part in source:
            pair = isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)
            if not isinstance(part[1] if pair else part, (nn.Module, Tensor)):
                raise _no_heads(part)
            yield from _parameters(part[1] if pair else part)
    else:
        raise _no_heads(source)


def _no_heads(found: object) -> InputError:
    return InputError(
        "Parameter `head_parameters` should be a module, parameters or pairs of names and "
        f"parameters. Found a {type(found).__name__}. Remedy: `head_parameters=critic`, or "
        "`critic.parameters()`."
    )


def check_leaves(leaves: Sequence[Tensor], heads: Sequence[Tensor]) -> None:
    """Refuses outputs and heads' parameters that an output is made from: they would count twice.

    Args:
        leaves: The model's outputs.
        heads: Parameters of the losses.

    Raises:
        InputError: If there are such outputs or parameters.
    """
    if len(leaves) < 2 and not heads:
        return
    ends = {get_gradient_edge(leaf).node for leaf in leaves}
    starts = [after for end in ends for after, _ in end.next_functions if after is not None]
    # Once for all of them: a graph has no circles, so no output is upstream of itself.
    upstream = _upstream(starts, set())
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


def check_losses(losses: Mapping[str, Tensor], leaves: Sequence[Tensor]) -> dict[str, int]:
    """Looks at losses and their graphs before anything is computed.

    Args:
        losses: Losses by name.
        leaves: The model's outputs.

    Returns:
        Each loss with how many of the later ones share nodes of its graph.

    Raises:
        InputError: If a loss is no scalar, does not depend on the outputs, or goes through a
            reentrant checkpoint.
    """
    stops = {get_gradient_edge(leaf).node for leaf in leaves}
    graphs: dict[str, set[Node]] = {}
    for name, loss in losses.items():
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"Loss {name!r} should be a tensor with one real number. Found {shape}. "
                "Remedy: `loss.mean()`, or None where it is missing in a step."
            )
        nodes, touches = _nodes_above(loss, stops)
        if not touches:
            raise _independent(name)
        if any(node.name() == "CheckpointFunctionBackward" for node in nodes):
            raise InputError(
                f"Loss {name!r} should have a graph that can be differentiated by parts. Found a "
                "reentrant checkpoint in it. Remedy: checkpoint(..., use_reentrant=False), or "
                "`fork(y)` and an ordinary backward."
            )
        graphs[name] = nodes
    names = list(graphs)
    return {
        name: sum(not graphs[name].isdisjoint(graphs[other]) for other in names[i + 1 :])
        for i, name in enumerate(names)
    }


def _independent(name: str) -> InputError:
    return InputError(
        f"Loss {name!r} should depend on `y`. Found a graph in which it does not. Remedy: compute "
        "it from the very tensor handed in as `y`, not from a copy, a detached tensor or another "
        "output, and outside of a compiled function that returns both, or use `fork` inside it; "
        "add losses of other things to the total outside of the balancer."
    )


def _nodes_above(loss: Tensor, stops: set[Node]) -> tuple[set[Node], bool]:
    """The nodes between a loss and the outputs, and whether there is a way."""
    if not loss.requires_grad:
        return set(), False
    found = _upstream([get_gradient_edge(loss).node], stops)
    # Parameters' own nodes hold nothing that a first pass could free.
    return {n for n in found - stops if n.next_functions}, not found.isdisjoint(stops)


def _upstream(stack: list[Node], stops: set[Node]) -> set[Node]:
    """All nodes that a backward pass from these would reach, not going on behind ``stops``."""
    found: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            if node not in stops:
                stack += [after for after, _ in node.next_functions if after is not None]
    return found


def part_gradients(
    losses: Mapping[str, Tensor],
    overlaps: Mapping[str, int],
    leaves: Sequence[Tensor],
    heads: Sequence[Tensor],
    *,
    retain_graph: bool,
) -> Partials:
    """Differentiates each loss by itself.

    Args:
        losses: Losses by name.
        overlaps: What :func:`check_losses` gave; a graph that a later loss needs is kept.
        leaves: The model's outputs.
        heads: Parameters of the losses.
        retain_graph: Whether to keep every graph.

    Raises:
        InputError: If a loss depends on none of the outputs, or several share a compiled graph.
    """
    found = Partials({}, {})
    inputs = [*leaves, *heads]
    for name, shared in overlaps.items():
        keep = retain_graph or shared > 0
        with _silent(leaves), _donated(name):
            grads = torch.autograd.grad(losses[name], inputs, retain_graph=keep, allow_unused=True)
        found.outputs[name] = list(grads[: len(leaves)])
        found.heads[name] = list(grads[len(leaves) :])
        if all(g is None for g in found.outputs[name]):
            raise _independent(name)
    return found


@contextmanager
def _donated(name: str) -> Iterator[None]:
    """Says what to do about a compiled graph that writes over what it has kept as it goes back."""
    try:
        yield
    except RuntimeError as error:
        if "donated buffers" not in str(error):
            raise
        raise InputError(
            f"Loss {name!r} should have a graph of its own, or one that is not compiled. Found a "
            "compiled one that is needed again and can be gone through once. Remedy: `fork(y)`; or "
            "`torch._functorch.config.donated_buffer = False` before it is compiled."
        ) from error


@contextmanager
def _silent(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Keeps the outputs' own hooks from seeing partial gradients; they see the balanced one.

    FSDP2 gathers parameters in such a hook: once for every loss, and for ever on a process that
    waits for one with fewer losses.
    """
    hooks = [leaf._backward_hooks for leaf in leaves]
    kept = [dict(h) if h else {} for h in hooks]
    retained = [(leaf, leaf.grad) for leaf in leaves if leaf.retains_grad]
    for h in hooks:
        if h:
            h.clear()
    try:
        yield
    finally:
        for h, k in zip(hooks, kept, strict=True):
            if h is not None:
                h.update(k)
        for leaf, gradient in retained:
            leaf.grad = gradient
