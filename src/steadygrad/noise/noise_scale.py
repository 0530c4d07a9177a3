"""The gradient noise scale, nearly free: from gradients that training computes anyway."""

import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError, check_choice, check_count, check_number, check_type
from steadygrad._names import own_name
from steadygrad.averages import check_state
from steadygrad.distributed import World, data_parallel_world
from steadygrad.noise.estimate import (
    NoiseEstimate,
    default_capacity,
    empty_ring,
    estimate_from,
    push,
    skipped_in,
)
from steadygrad.noise.sources import Source
from steadygrad.noise.sums import Sums, euclidean_norms, preconditioned_norms


class NoiseScale:
    r"""Measures the gradient noise scale :math:`\mathrm{tr}(\Sigma)/|G|^2` while a model trains.

    The spread of the parts' gradients around their mean estimates the noise. The squared norm of
    that mean, less its noise term, estimates the signal. The parts of a batch are what training
    makes anyway: micro-batches and ranks, or single examples. Averages first, divides once.

    .. code-block:: python

        noise = NoiseScale(model, samples=lambda: len(micro))
        for micro in micro_batches:
            (loss(micro) / len(micro_batches)).backward()
        noise.step()                # before clipping, once per optimizer step
        optimizer.step(); optimizer.zero_grad()
        print(noise.estimate().as_dict())

    Every backward pass is a micro-batch, which the parameters' hooks find by themselves; its size
    is ``samples``, or what :meth:`samples` announced. ``with noise.microbatch(n):`` around a
    pass does the same, and is what the other sources need.

    On several processes ``step()`` makes one collective call, and every process gets the same
    estimate. Every rank's micro-batch is a part, before its gradients are reduced. With
    ``source="accumulated"`` the parts are differences of ``.grad``, under FSDP2 of reduced shards:
    for the preconditioned metric, whose state is sharded, and for several passes a part.

    A step with a non-finite gradient is left out and counted in ``skipped``. So is one where
    ``.grad`` is not the sum of the parts, up to rounding: clipped, unscaled, divided, or left from
    before, or where ranks with copies of the model have not the same; ``altered`` counts these, and
    one warning says so.

    Args:
        model: The model as it is called in training: wrapped in DDP, sharded by ``fully_shard``,
            compiled, or plain. Its trainable parameters at this moment are measured.
        samples: Samples in this process's micro-batch: a number, or a function that returns it and
            is called in the backward pass. None: only passes that :meth:`samples` or
            :meth:`microbatch` tells of are measured.
        decay: Weight ratio of one measurement to the next newer one, in (0, 1]; 1 averages the
            whole history, of the newest 4,096 measurements. Default: 0.99.
        source: ``"microbatch"``, ``"per_example"`` (exact, for common layers), ``"accumulated"``.
        metric: ``"euclidean"``; ``"preconditioned"`` weighs by the second moment of ``optimizer``.
        optimizer: The optimizer in use, for this metric.
        accumulation: How the micro-batches' losses make up the step: ``"mean"``: each is a mean,
            divided by their number on this process (the default); ``"sum"``: each is an undivided
            mean; ``"samples"``: each is a sum, divided by this process's samples.
        groups: Names a parameter's group from its name. Default: the first part of the name.
        scaler: A gradient scaler whose scale the losses carry: anything with torch's method
            ``scale``, or ``LayerwiseGradScaler``, with every parameter's own.
        level: Probability with which intervals should cover the truth. Default: 0.95.
        every: Number of steps of which one is measured, for a share of the cost. The first is
            measured. With ``"per_example"`` only the forward passes of measured steps are hooked,
            so run the forward passes of a step after ``step()`` of the previous one.
        drift: Whether the noise scale may drift, as it does while weights move; then estimates
            are of the newest part of the history where a test finds that it does. False, for
            measurements at fixed weights: of the whole history, always.

    Raises:
        InputError: If an argument is wrong, nothing is trainable, or a layer is not supported.

    References:
        | An Empirical Model of Large-Batch Training (McCandlish et al., 2018)
        | https://arxiv.org/abs/1812.06162
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float = 0.99,
        *,
        samples: Callable[[], int] | int | None = None,
        source: str = "microbatch",
        metric: str = "euclidean",
        optimizer: Optimizer | None = None,
        accumulation: str = "mean",
        groups: Callable[[str], str] | None = None,
        scaler: Any = None,
        level: float = 0.95,
        every: int = 1,
        drift: bool = True,
    ) -> None:
        check_type("model", model, nn.Module, "the model as it is called in training")
        self._decay = check_number("decay", decay, low=0, high=1, low_open=True)
        if not (samples is None or callable(samples)):
            check_count("samples", samples)
        check_choice("source", source, ("microbatch", "per_example", "accumulated"))
        check_choice("metric", metric, ("euclidean", "preconditioned"))
        check_choice("accumulation", accumulation, ("mean", "sum", "samples"))
        group_of = groups or (lambda name: name.split(".")[0])
        check_type("groups", group_of, Callable, "`groups=table.get` for a dict")  # type: ignore[arg-type]
        self._level = check_number("level", level, low=0, high=1, low_open=True, high_open=True)
        self._every = check_count("every", every)
        self._drift = check_type("drift", drift, bool, "True or False")
        self.world = data_parallel_world(model)
        _check_combination(source, metric, self.world)

        parameters = _trainable_parameters(model)
        labels = [group_of(own_name(name, model)) for name in parameters]
        self._groups = list(dict.fromkeys(labels))
        rows = [self._groups.index(label) for label in labels]
        norms = euclidean_norms if metric == "euclidean" else preconditioned_norms(optimizer)
        self._sums = Sums(parameters, rows, self.world, norms, reduced=source == "accumulated")
        self._witness, device = self._sums.witness, self._sums.device
        capacity = default_capacity(decay, most=4096)
        self._ring, self._pushed = empty_ring(capacity, len(self._groups), device)
        scale = _loss_scale_of(scaler, self._sums)
        self._source = Source(
            source, model, self._sums, samples=samples, accumulation=accumulation, loss_scale=scale
        )
        # One that is dropped leaves no hooks behind either.
        self._remove = weakref.finalize(self, self._source.remove)
        self._remove.atexit = False
        # Whether a step has had parts enough.
        self._whole = False
        self._begin(0)

    def _begin(self, steps: int) -> None:
        """Forgets the step under way, after a number of whole ones."""
        self._steps, self._measures = steps, steps % self._every == 0
        self._source.clear()
        self._source.enable(self._measures)
        self._witness.turn(steps // self._every)

    @property
    def skipped(self) -> Tensor:
        """Number of steps in the history that were left out, with shape ``()``."""
        return skipped_in(self._ring, self._pushed)

    @property
    def altered(self) -> Tensor:
        """Number of steps left out as ``.grad`` was not the parts' sum, with shape ``()``."""
        return self._witness.count

    def samples(
        self,
        num_samples: int,
        *,
        weight: Tensor | float | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> None:
        """Tells of the next backward pass, which with ``"microbatch"`` then needs no context.

        Arguments and errors are those of :meth:`microbatch`.
        """
        self._source.told = self._source.part(num_samples, weight, loss_scale)

    def microbatch(
        self,
        num_samples: int,
        *,
        weight: Tensor | float | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> AbstractContextManager[None]:
        """A context around the backward pass of one micro-batch.

        Args:
            num_samples: Samples in this process's micro-batch; with ``"accumulated"`` on several
                processes, the same on each. 0, where all are masked: no part.
            weight: Factor between the micro-batch's mean loss and what ``backward`` is called
                on, loss scale aside; a tensor stays on its device. Default: as ``accumulation``
                says.
            loss_scale: Loss scale of this backward pass. Default: the scaler's, or 1.

        Raises:
            InputError: If a count or weight is negative, or only some weights are given.
        """
        return self._source.context(self._source.part(num_samples, weight, loss_scale))

    @torch.no_grad()
    def step(self, *, grad_scale: Tensor | float | None = None) -> None:
        """Takes one measurement. Call it once per optimizer step, on every process.

        ``.grad`` must hold the step's whole gradient and nothing else: after the last backward
        pass, before clipping and before ``optimizer.step()``.

        Args:
            grad_scale: Loss scale still in ``.grad``; 1 after ``scaler.unscale_``. Default: that
                of the last micro-batch; ``LayerwiseGradScaler`` knows it.

        Raises:
            InputError: If the step has fewer than two parts, or two that are passes over one
                forward pass; once a step had what it needs, such a step is left out and counted
                in ``skipped``.
        """
        if not self._measures:
            self._begin(self._steps + 1)
            return
        self._source.finish()
        wrong = self._source.wrong()
        self._whole = self._whole or wrong is None
        self._sums.broken = self._sums.broken or wrong is not None
        # A short window at an epoch's end is no mistake, and is left out.
        wrong = None if self._whole else wrong
        try:
            # The other processes wait in the collective, so this one joins it before it raises.
            if wrong is None or self.world.size > 1:
                push(self._ring, self._pushed, self._source.measure(grad_scale))
        finally:
            self._begin(self._steps + 1)
        if wrong is not None:
            raise wrong

    def drop_step(self) -> None:
        """Forgets the micro-batches since the last step, whose gradients are thrown away.

        For a loop that calls ``zero_grad()`` without a step, as after a loss that is not finite.
        What could have been measured counts in ``skipped``. Each process must drop the same step.
        """
        self._source.finish()
        if self._measures and not self._sums.broken and self._source.wrong() is None:
            push(self._ring, self._pushed, (self._ring[0] * torch.nan).unbind())
        self._begin(self._steps)

    def estimate(self) -> NoiseEstimate:
        """The noise scale so far, whole and by group; nothing waits until a number is read."""
        return estimate_from(
            self._ring,
            self._pushed,
            self._decay,
            self._level,
            groups=self._groups,
            drift=self._drift,
            altered=self.altered.clone(),
        )

    def reset(self) -> None:
        """Forgets every measurement, as after a change of the learning rate."""
        self._ring.zero_()
        self._pushed.zero_()
        self._begin(0)

    def remove(self) -> None:
        """Takes every hook off the model; the estimate stays."""
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        """The measurements, the same on every process; to be saved between steps."""
        return {
            "groups": list(self._groups),
            "ring": self._ring.clone(),
            "pushed": self._pushed.clone(),
            "steps": self._steps,
            "altered": self.altered.clone(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts saved measurements back; a step that had begun is forgotten.

        Raises:
            InputError: If they are of other groups or another history, or damaged.
        """
        check_type("state", state, Mapping, "what state_dict() returned")  # type: ignore[type-abstract]
        # Earlier releases compared first and last parts, too.
        given = {name: value for name, value in state.items() if name != "likeness"}
        # A measurement that was left out is not finite.
        check_state("state_dict", given, self.state_dict(), finite=False)
        self._begin(given["steps"])
        self._ring.copy_(given["ring"])
        self._pushed.copy_(given["pushed"])
        self.altered.copy_(given["altered"])


def _check_combination(source: str, metric: str, world: World) -> None:
    """Refuses combinations that measure no noise scale, before any hook is registered."""
    allowed = {"microbatch", "per_example", "accumulated"}
    if world.kind == "ddp":
        # Its `.grad` is local or reduced depending on `no_sync`.
        allowed.remove("accumulated")
    if metric != "euclidean":
        # An optimizer's state is no example's, and is sharded as its parameters are.
        allowed -= {"per_example", "microbatch"} if world.kind == "fsdp" else {"per_example"}
    if source not in allowed:
        raise InputError(
            f"Expected `source` to be {' or '.join(sorted(allowed))} for metric={metric!r} of "
            f"a {world.kind} model. Found source={source!r}. Remedy: one of these."
        )


def _trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name; warns once if a layer makes the samples of a batch depend on each other."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trainable or any(parameter.is_meta for parameter in trainable.values()):
        raise InputError(
            "Expected `model` with trainable parameters on a device. Found "
            f"{'some on `meta`' if trainable else 'none to measure'}. Remedy: build NoiseScale "
            "after `requires_grad_()`, `to_empty` or the first load."
        )
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            warnings.warn(
                f"{own_name(name, model)!r} ({type(module).__name__}) normalises over the batch, "
                "so the samples of a micro-batch are not independent, and the noise scale is only "
                "approximate. Remedy: LayerNorm or GroupNorm, or ignore this warning.",
                stacklevel=3,
            )
            break
    return trainable


def _loss_scale_of(scaler: Any, sums: Sums) -> Callable[[], Tensor | float]:
    """Asks for the loss scale that gradients carry, one or each parameter's; nothing waits."""
    if scaler is None:
        return lambda: 1.0
    if hasattr(scaler, "parameter_scales"):
        carried = scaler.parameter_scales(sums.parameters)
        return lambda: carried().to(sums.device)
    # Through the public method: it hands out the scale without waiting for the device.
    return lambda: scaler.scale(torch.ones((), device=sums.device))
