r"""Sums over the parts of one step.

With :math:`h_j = a_j g_j` what part ``j`` (a micro-batch, a rank or an example) adds to ``.grad``,
all that is needed of the parts is

.. math:: A = \sum a_j, \quad B = \sum |h_j|^2 / a_j, \quad C = \sum a_j / n_j, \quad
          D = \sum a_j^2 / n_j,

so the contributions of all processes add up in one collective. Then, with :math:`w_j = a_j / A`,
:mod:`steadygrad.noise.equations` apply.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError, check_type
from steadygrad.distributed import World, fsdp_modules
from steadygrad.noise.equations import SignalNoise, copies_differ, from_part_sums
from steadygrad.noise.witness import Witness
from steadygrad.numerics import exact, wide
from steadygrad.shards import is_sharded, local, replicas

Norms = Callable[[Sequence[nn.Parameter], Sequence[Tensor]], Sequence[Tensor]]

# Gradients with fewer elements are held until the part is over, and measured in one call: on small
# layers the calls are what a measurement costs. Larger ones are measured while they are at hand.
_SMALL = 2**16


def gradient_leaves(model: nn.Module) -> dict[str, nn.Parameter]:
    """Leaves that receive the gradients, by names: with FSDP2 the unsharded ones that it keeps."""
    leaves = dict(model.named_parameters())
    for module in fsdp_modules(model):
        module.unshard()  # type: ignore[operator]
        leaves |= {name: p for name, p in model.named_parameters() if not is_sharded(p)}
        module.reshard()  # type: ignore[operator]
    return leaves


def values_of(gradient: Tensor) -> Tensor:
    """This process's part of a gradient; dense, as every row counts and none is waited for."""
    here = gradient if type(gradient) is Tensor else local(gradient)
    return here.to_dense() if here.layout is not torch.strided else here


def euclidean_norms(
    parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]
) -> Sequence[Tensor]:
    """The ordinary norms, each with shape ``()``, added up in float32 at least."""
    kinds = {(gradient.dtype, gradient.device) for gradient in gradients}
    if len(kinds) == 1:
        return torch._foreach_norm(list(gradients), 2, dtype=wide(gradients[0].dtype))
    return [torch.linalg.vector_norm(each, dtype=wide(each.dtype)) for each in gradients]


def preconditioned_norms(optimizer: Optimizer | None) -> Norms:
    r"""The norm :math:`\sqrt{g^\top P^{-1} g}` with :math:`P = \sqrt{\hat v} + \epsilon`.

    For updates :math:`P^{-1} g` and a curvature that looks like ``P``, the noise scale becomes
    :math:`\mathrm{tr}(P^{-1}\Sigma) / G^\top P^{-1} G` (McCandlish et al., 2018, appendix A.1).
    ``P`` is the second moment of Adam and its kin, or RMSprop, as it stands before the step, so it
    is independent of the gradients measured with it; until it exists the norm is NaN.
    """
    optimizer = check_type("optimizer", optimizer, Optimizer, "the optimizer in use")

    def norm(options: Mapping[Any, Any], parameter: nn.Parameter, gradient: Tensor) -> Tensor:
        dtype, state = wide(gradient.dtype), optimizer.state.get(parameter)
        if not state:
            return gradient.new_full((), torch.nan, dtype=dtype)
        # AMSGrad divides by the largest.
        moments = (state.get(name) for name in ("max_exp_avg_sq", "exp_avg_sq", "square_avg"))
        second = next((local(moment).to(dtype) for moment in moments if moment is not None), None)
        group = options[parameter]
        betas: Any = group.get("betas")
        step = state.get("step", group.get("step"))
        averaged = betas is not None and "exp_avg_sq" in state
        odd = (betas is not None and len(betas) != 2) or (averaged and step is None)
        if odd or second is None or second.shape != gradient.shape:
            raise InputError(
                "Expected `optimizer` with two betas, `step`, and a second moment of each element, "
                f"for metric='preconditioned'. Found {type(optimizer).__name__} with betas={betas},"
                f" step={step} and {sorted(state)} of each parameter. Remedy: metric='euclidean'."
            )
        if averaged:
            step = torch.as_tensor(step).to(exact(second.device))
            second = second / -torch.expm1(step * math.log(betas[1]))
        inverse = torch.rsqrt(second.sqrt() + group.get("eps", 1e-8))
        return torch.linalg.vector_norm(gradient.to(inverse) * inverse)  # type: ignore[no-any-return]

    def norms(parameters: Sequence[nn.Parameter], gradients: Sequence[Tensor]) -> Sequence[Tensor]:
        # Looked up each time: loading a state makes new groups.
        options = {p: group for group in optimizer.param_groups for p in group["params"]}
        return [norm(options, *pair) for pair in zip(parameters, gradients, strict=True)]

    return norms


class Sums:
    """Sums over the parts of one step, on this process and over all processes.

    A slot is an index into the measured parameters; ``groups`` has each slot's. ``reduced``
    gradients are those of all processes, sharded like the parameters. Weights may be off by one
    factor until the step is over; ``broken`` steps cannot be measured.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        groups: Sequence[int],
        world: World,
        norms: Norms,
        *,
        reduced: bool,
    ) -> None:
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.world, self.device = world, self.parameters[0].device
        self.together = world.size if reduced else 1
        self._norms_of = norms
        self._zero = torch.zeros((), dtype=exact(self.device), device=self.device)
        self._groups, self._rows = max(groups) + 1, torch.tensor(groups, device=self.device)
        # A reduced gradient is seen by every process that holds a copy; it must count once.
        self._shares = self._zero.new_tensor([1 / replicas(p, world) for p in self.parameters])
        self._part_shares = self._shares if reduced else torch.ones_like(self._shares)
        self.witness = Witness(self.parameters, world, self._zero, reduced)
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        # Folded as parts come, so that passes without a step hold no memory.
        self._squares = torch.zeros_like(self._shares)
        self.a: Tensor | float = 0.0
        self.c: Tensor | float = 0.0
        self.d: Tensor | float = 0.0
        self.parts = self.samples = 0
        self.broken = False
        self.witness.clear()
        self.drop_part()

    def drop_part(self) -> None:
        """Forgets the open part."""
        self._held: dict[int, Tensor] = {}
        self._norms: dict[int, Tensor] = {}
        self.witness.drop_part()

    def see(self, slot: int, gradient: Tensor) -> None:
        """Takes the gradient that the open part adds to a parameter, dense, as it is here."""
        self.witness.see(slot, gradient)
        if gradient.numel() < _SMALL:
            self._refuse_second(slot)
            self._held[slot] = gradient
        else:
            self.see_norm(slot, self._norms_of([self.parameters[slot]], [gradient])[0])

    def see_norm(self, slot: int, norm: Tensor) -> None:
        """Takes its norm."""
        self._refuse_second(slot)
        self._norms[slot] = norm

    def _refuse_second(self, slot: int) -> None:
        if slot in self._norms or slot in self._held:
            raise InputError(
                f"Expected one gradient of {self.names[slot]!r} a micro-batch. Found two: "
                "several backward passes, or a reentrant checkpoint of a reused layer. Remedy: "
                "NoiseScale(source='accumulated'), or checkpoint(..., use_reentrant=False)."
            )

    def end_part(
        self, weight: Tensor | float, samples: int, parts: int, loss_scale: Tensor | float
    ) -> None:
        """Closes the open part, which is made of equal ones.

        Its weight is the factor between its mean loss and what ``backward`` was called on, its loss
        scale one for all, or for each slot.
        """
        scaled = self._column(self._norms, self._held) / loss_scale
        self._squares.addcmul_(scaled, scaled * _inverse(weight / parts))
        self.witness.end_part(loss_scale)
        self.drop_part()
        samples *= self.together
        self.a = self.a + weight
        self.c = self.c + weight * (parts / samples)
        self.d = self.d + weight * weight / samples
        self.parts += parts
        self.samples += samples

    def _column(self, norms: Mapping[int, Tensor], gradients: Mapping[int, Tensor]) -> Tensor:
        """Norms by slot, known or to be taken of gradients; zero for the others."""
        slots = sorted(gradients)
        parameters = [self.parameters[slot] for slot in slots]
        column = self._norms_of(parameters, [gradients[s] for s in slots]) if slots else []
        if len(column) < len(self.parameters):
            known = {**norms, **dict(zip(slots, column, strict=True))}
            column = [known.get(slot, self._zero) for slot in range(len(self.parameters))]
        there = self._zero.device
        return torch.stack([n if n.device == there else n.to(there) for n in column]).to(self._zero)

    def measure(self, factor: float, scale: Tensor | float) -> SignalNoise:
        """Signal and noise of every group, each with shape ``(groups,)``; one collective.

        They are NaN where a gradient is not finite or ``.grad`` is anything but the sum of the
        parts, and infinite where a process had no step. ``factor`` is true weights over those that
        the parts came with, ``scale`` the loss scale still in ``.grad``, one or each slot's.
        """
        if self.broken:
            # Through the collective it reaches every process, and all leave the step out.
            self.a = math.nan
        grads = enumerate(p.grad for p in self.parameters)
        gradients = {slot: values_of(grad) for slot, grad in grads if grad is not None}
        # Gradient summed over what the processes saw, over `.grad`.
        multiple = self.world.size / self.together
        whole = self._column({}, gradients) * multiple / scale
        rows = [self._squares / factor * self._part_shares, whole * whole * self._shares]
        by_group = self._zero.new_zeros(2, self._groups)
        by_group.index_add_(1, self._rows, torch.stack(rows))
        facts = (self.a * factor, self.c * factor, self.d * factor**2)
        row = torch.stack([self._zero + fact * (1 / self.together) for fact in facts])
        # Where processes hold copies, these have the same norms.
        copied = by_group[1].square().sum() * (self.world.kind == "ddp")
        here = torch.cat([row, copied[None], by_group.flatten()])

        packed = torch.cat([here, self.witness.column(gradients, multiple, scale)])
        sums, seen = self.world.sum(packed).tensor_split([len(here)])
        a, c, d, copied = sums[:4]
        parts, mean = sums[4:].view(2, self._groups)
        unequal = copies_differ(mean, copied, self.world.size)
        kept = self.witness.judge(seen, torch.isfinite(sums).all(), unequal)
        measured = from_part_sums(parts / a, mean / (a * a), c / a, d / (a * a))
        left_out = torch.where(torch.isfinite(a), torch.nan, torch.inf)
        return tuple(torch.where(kept, x, left_out) for x in measured)


def _inverse(weight: Tensor | float) -> Tensor | float:
    """Inverse of a weight; a part of weight zero, as of padding alone, adds nothing."""
    if isinstance(weight, Tensor):
        return torch.where(weight == 0, 0.0, 1 / weight)
    return 1 / weight
