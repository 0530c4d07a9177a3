"""Gradients of single losses, with respect to the outputs and to the parameters of loss heads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.balance.graphs import independent

__all__ = ["HeadParameters", "PerLossGradients", "head_parameters_of", "loss_gradients"]


class PerLossGradients(NamedTuple):
    """Gradients of the model's outputs and of the head parameters, by the losses' names."""

    outputs: dict[str, list[Tensor | None]]
    heads: dict[str, list[Tensor | None]]


HeadParameters = nn.Module | Tensor | Iterable["nn.Module | Tensor | tuple[str, Tensor]"]


def head_parameters_of(source: HeadParameters) -> list[Tensor]:
    """Collects the parameters that require a gradient, each once.

    Raises:
        InputError: If ``source`` holds something else.
    """
    one = isinstance(source, (nn.Module, Tensor, str, Mapping)) or not isinstance(source, Iterable)
    parts: Iterable[Any] = [source] if one else source  # type: ignore[assignment]
    unique = {}
    for part in parts:
        named = isinstance(part, tuple) and len(part) == 2 and isinstance(part[0], str)
        owner = part[1] if named else part
        if not isinstance(owner, (nn.Module, Tensor)):
            raise InputError(
                "Parameter `head_parameters` should be a module, parameters or pairs of names and "
                f"parameters. Found a {type(part).__name__}. Remedy: `head_parameters=critic`, or "
                "`critic.parameters()`."
            )
        # A parameter shared by two heads must be asked for once.
        parameters = owner.parameters() if isinstance(owner, nn.Module) else [owner]
        unique.update({id(p): p for p in parameters if p.requires_grad})
    for p in unique.values():
        if not p.is_leaf:
            raise InputError(
                "Parameter `head_parameters` should hold parameters. Found a tensor of shape "
                f"{tuple(p.shape)} that was computed. Remedy: what it was computed from."
            )
    return list(unique.values())


def loss_gradients(
    losses: Mapping[str, Tensor],
    overlaps: Mapping[str, int],
    outputs: Sequence[Tensor],
    heads: Sequence[Tensor],
    *,
    retain_graph: bool,
) -> PerLossGradients:
    """Differentiates each loss by itself; frees its graph unless ``overlaps`` says it is needed.

    Raises:
        InputError: If a loss depends on none of the outputs, or several share a compiled graph.
    """
    gradients = PerLossGradients({}, {})
    inputs = [*outputs, *heads]
    for name, shared in overlaps.items():
        keep = retain_graph or shared > 0
        with _without_hooks(outputs), _compiled_graph_error(name):
            grads = torch.autograd.grad(losses[name], inputs, retain_graph=keep, allow_unused=True)
        gradients.outputs[name] = list(grads[: len(outputs)])
        gradients.heads[name] = list(grads[len(outputs) :])
        if all(g is None for g in gradients.outputs[name]):
            raise independent(name)
    return gradients


@contextmanager
def _compiled_graph_error(name: str) -> Iterator[None]:
    """Explains the error of a compiled graph, which can run backward once: it reuses its memory."""
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
def _without_hooks(outputs: Sequence[Tensor]) -> Iterator[None]:
    """Hides partial gradients from the outputs' own hooks, which see the balanced one.

    FSDP2 gathers parameters in such a hook: once for every loss, and for ever on a process that
    waits for one with fewer losses.
    """
    hooks = [output._backward_hooks for output in outputs]
    kept = [dict(h) if h else {} for h in hooks]
    retained = [(output, output.grad) for output in outputs if output.retains_grad]
    for h in hooks:
        if h:
            h.clear()
    try:
        yield
    finally:
        for h, k in zip(hooks, kept, strict=True):
            if h is not None:
                h.update(k)
        for output, gradient in retained:
            output.grad = gradient
