"""Norms of gradients: the ordinary one, and the one that an optimizer's second moment makes."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.shards import local

__all__ = ["Moments", "Norms", "euclidean_norms", "preconditioned_norms", "values_of"]

Norms = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], Sequence[Tensor]]


def euclidean_norms(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The ordinary norms, each with shape ``()``, added up in float32 at least."""
    kinds = {(gradient.dtype, gradient.device) for gradient in gradients}
    if len(kinds) == 1:
        return torch._foreach_norm(list(gradients), 2, dtype=_wide(gradients[0]))
    return [torch.linalg.vector_norm(gradient, dtype=_wide(gradient)) for gradient in gradients]


def preconditioned_norms(optimizer: Optimizer) -> Norms:
    r"""The norm :math:`\sqrt{g^\top P^{-1} g}` with :math:`P = \sqrt{\hat v} + \epsilon`.

    For updates :math:`P^{-1} g` and a curvature that looks like ``P``, the noise scale becomes
    :math:`\mathrm{tr}(P^{-1}\Sigma) / G^\top P^{-1} G`. ``P`` is the optimizer's second moment as
    it stands before the step, so it is independent of the gradients measured with it; until it
    exists the norm is NaN, and the measurement is left out.

    Args:
        optimizer: An optimizer whose state holds ``exp_avg_sq`` (Adam and its kin) or
            ``square_avg`` (RMSprop).

    Returns:
        The norms as a function of parameters and their gradients.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018), appendix A.1
        | https://arxiv.org/abs/1812.06162
    """
    options = {p: group for group in optimizer.param_groups for p in group["params"]}
    for group in optimizer.param_groups:
        if len(group.get("betas", (0, 0))) != 2:
            raise _unknown_moment(optimizer, f"with {len(group['betas'])} betas")
    # AMSGrad divides by the largest.
    moments = Moments(optimizer, ("max_exp_avg_sq", "exp_avg_sq", "square_avg"))

    def norm(parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        found = moments.of(parameter)
        if found is None:
            return gradient.new_full((), torch.nan, dtype=_wide(gradient))
        second, state = found.to(_wide(gradient)), optimizer.state[parameter]
        if second.shape != gradient.shape:
            raise _unknown_moment(optimizer, f"whose second moment has shape {tuple(second.shape)}")
        if "exp_avg_sq" in state and "betas" in options[parameter]:
            step = state.get("step", options[parameter].get("step"))
            if step is None:
                raise _unknown_moment(optimizer, "without `step` in its state")
            beta = options[parameter]["betas"][1]
            if isinstance(step, Tensor) and step.device.type != "cpu":
                # As 1 - beta^t it would cancel in float32.
                second = second / -torch.expm1(step * math.log(beta))
            else:
                second = second / (1 - beta ** float(step))
        inverse = torch.rsqrt(second.sqrt() + options[parameter].get("eps", 1e-8))
        weighted: Tensor = torch.linalg.vector_norm(gradient.to(inverse) * inverse)
        return weighted

    return lambda parameters, gradients: [
        norm(p, g) for p, g in zip(parameters, gradients, strict=True)
    ]


def _unknown_moment(optimizer: Optimizer, found: str) -> InputError:
    return InputError(
        "Expected `optimizer` with two betas, and a second moment of each element, for "
        f"metric='preconditioned'. Found {type(optimizer).__name__} {found}. "
        "Remedy: metric='l1' or 'euclidean'."
    )


class Moments:
    """A moving average that an optimizer keeps of each parameter's gradient.

    Args:
        optimizer: The optimizer.
        names: What the average may be called in its state.
    """

    def __init__(self, optimizer: Optimizer, names: Sequence[str]) -> None:
        self._optimizer, self._names, self._stepped = optimizer, names, False
        optimizer.register_step_post_hook(self._note_step)

    def _note_step(self, *_: object) -> None:
        self._stepped = True

    def of(self, parameter: nn.Parameter) -> Tensor | None:
        """This process's part of a parameter's average; None before there is one.

        Raises:
            InputError: If the optimizer has taken a step and keeps no such average.
        """
        state = self._optimizer.state.get(parameter, {})
        for name in self._names:
            if state.get(name) is not None:
                return local(state[name])
        states = self._optimizer.state.values()
        kept = any(state.get(name) is not None for state in states for name in self._names)
        if self._stepped and not kept:
            raise InputError(
                f"Expected an optimizer whose state holds {' or '.join(self._names)}. Found "
                f"{type(self._optimizer).__name__}, which has taken a step without. Remedy: "
                "metric='euclidean', or an optimizer with momentum or second moments."
            )
        return None


def values_of(gradient: Tensor) -> Tensor:
    """This process's part of a gradient; dense, as every row counts and none is waited for."""
    here = gradient if type(gradient) is Tensor else local(gradient)
    return here.to_dense() if here.layout is not torch.strided else here


def _wide(gradient: Tensor) -> torch.dtype:
    return torch.promote_types(gradient.dtype, torch.float32)
