"""Gradients of single losses, each through its own part of the graph only."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.balance.graphs import independent

__all__ = ["Heads", "Partials", "parameters_of", "part_gradients"]


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
            raise independent(name)
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
