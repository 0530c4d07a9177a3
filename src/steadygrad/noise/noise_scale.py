"""The gradient noise scale, nearly free: from gradients that training computes anyway."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import check_count, check_type
from steadygrad.distributed import data_parallel_world
from steadygrad.noise.build import (
    check_finds_passes,
    check_options,
    choose_parameters,
    make_meter,
    warn_of_batch_norm,
)
from steadygrad.noise.estimate import History, NoiseEstimate
from steadygrad.noise.loss_scale import LossScale, Scaler
from steadygrad.noise.micro_batches import MicroBatches
from steadygrad.noise.per_example import ExampleNorms
from steadygrad.noise.repeats import Repeats
from steadygrad.noise.sources import AccumulatedSource, BackwardSource, ExampleSource, Source
from steadygrad.noise.witness import Alterations

__all__ = ["NoiseScale"]


class NoiseScale:
    r"""Measures the gradient noise scale :math:`\mathrm{tr}(\Sigma)/|G|^2` while a model trains.

    The spread of the parts' gradients around their mean estimates the noise. The squared norm of
    that mean, less its noise term, estimates the signal. The parts of a batch are what training
    makes anyway: micro-batches, ranks, or both (``source="microbatch"``), or single examples
    (``"per_example"``). Averages first, divides once, and gives an interval with every estimate.

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

    On several processes ``step()`` makes one collective call, every process gets the same estimate,
    and every rank's micro-batch is a part, also under FSDP2, before its gradients are reduced.
    ``source="accumulated"`` instead takes differences of reduced shards: for the
    optimizer-matched metrics, whose state is sharded, and for several backward passes a part.

    A step with a non-finite gradient (an overflow under loss scaling) is left out and counted in
    ``skipped``. So is one where ``.grad`` is not the sum of the parts, up to rounding: clipped,
    unscaled, divided, or left from before. One warning says so, and ``altered`` counts
    such steps. The noise is kept per sample, so a new batch size needs no reset.

    Args:
        model: The model as it is called in training: wrapped in DDP, sharded by ``fully_shard``,
            compiled, or plain. Its trainable parameters at this moment are measured.
        samples: Samples in this process's micro-batch: a number, or a function that returns it and
            is called in the backward pass. None: only passes that :meth:`samples` or
            :meth:`microbatch` tells of are measured.
        decay: Weight ratio of one measurement to the next newer one, in (0, 1]; 1 averages the
            whole history. Default: 0.99.
        source: ``"microbatch"``, ``"per_example"`` (exact, for common layers), ``"accumulated"``.
        layers: For ``"per_example"``: ``"all"``, or ``"norm"`` for normalisation layers only.
        metric: ``"euclidean"``; ``"preconditioned"`` weighs by the optimizer's second moment;
            ``"l1"`` is the scale of sign- and Adam-like updates. The last two need ``optimizer``.
        optimizer: The optimizer in use, for these metrics.
        accumulation: How the micro-batches' losses make up the step: ``"mean"``: each is a mean,
            divided by their number on this process (the default); ``"sum"``: each is an undivided
            mean; ``"samples"``: each is a sum, divided by this process's samples. A wrong choice
            leaves ``value`` right, while the micro-batches are equal.
        groups: Names a parameter's group from its name. Default: the first part of the name.
        scaler: A gradient scaler whose scale the losses carry; with ``LayerwiseGradScaler`` every
            parameter's own.
        history: How many measurements are kept. Default: enough for ``decay``.
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
        layers: str = "all",
        metric: str = "euclidean",
        optimizer: Optimizer | None = None,
        accumulation: str = "mean",
        groups: Callable[[str], str] | None = None,
        scaler: Scaler | None = None,
        history: int | None = None,
        level: float = 0.95,
        every: int = 1,
        drift: bool = True,
    ) -> None:
        check_type("model", model, nn.Module, "the model as it is called in training")
        check_options(source, metric, accumulation, layers, optimizer, samples)
        self._every = check_count("every", every)
        warn_of_batch_norm(model)
        self.world = data_parallel_world(model)
        taps = ExampleNorms(model, layers) if source == "per_example" else None
        names = None if taps is None else set(taps.parameter_names)
        measured, group_names = choose_parameters(model, names, groups)
        device = measured[0].parameter.device
        self._loss_scale = LossScale(scaler, [m.parameter for m in measured], device)
        self._meter = make_meter(metric, optimizer, source, measured, len(group_names), self.world)
        self._likeness = self._meter.witness.likeness
        self._history = History(
            group_names,
            decay=decay,
            capacity=history,
            power=self._meter.power,
            level=level,
            device=device,
            drift=check_type("drift", drift, bool, "True or False"),
        )
        self._alterations = Alterations(device)
        self._parts = MicroBatches(
            self._meter,
            self._loss_scale,
            samples,
            accumulation,
            shared=source == "accumulated",
            by_example=source == "per_example",
            alike=metric == "l1",
        )
        self._source_name = source
        # Whether a step has had parts enough.
        self._whole = False
        self._source: Source
        if source == "accumulated":
            self._source = AccumulatedSource(self._meter)
        elif taps is not None:
            self._source = ExampleSource(model, self._meter, taps)
        else:
            self._source = BackwardSource(model, self._meter, self._parts.borders)
        self._parts.repeats = Repeats(model, [m.parameter for m in measured])
        # One that is dropped leaves no hooks behind either.
        hooked = (self._source, self._parts.repeats)
        self._remove = weakref.finalize(self, lambda: [each.remove() for each in hooked])
        self._remove.atexit = False
        self._begin(0)

    def _begin(self, steps: int) -> None:
        """Forgets the step under way, after a number of whole ones."""
        self._parts.clear()
        self._meter.witness.turn(steps // self._every)
        self._count(steps)

    def _count(self, steps: int) -> None:
        self._steps = steps
        self._source.enable(self._measures_now)

    @property
    def _measures_now(self) -> bool:
        return self._steps % self._every == 0

    @property
    def skipped(self) -> Tensor:
        """Number of steps in the history that were left out, with shape ``()``."""
        return self._history.skipped

    @property
    def altered(self) -> Tensor:
        """Number of steps left out as ``.grad`` was not the parts' sum, with shape ``()``."""
        return self._alterations.count

    def samples(
        self,
        num_samples: int,
        *,
        weight: Tensor | float | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> None:
        """Tells of the next backward pass; for where ``samples`` was not given, or is not enough.

        Args:
            num_samples: Samples in this process's micro-batch. 0, where all are masked: no part.
            weight: As in :meth:`microbatch`.
            loss_scale: As in :meth:`microbatch`.

        Raises:
            InputError: If the source is not ``"microbatch"``, a count or weight is negative, or
                only some weights are given.
        """
        check_finds_passes(self._source_name)
        self._parts.tell(self._parts.part(num_samples, weight, loss_scale))

    @contextmanager
    def microbatch(
        self,
        num_samples: int,
        *,
        weight: Tensor | float | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> Iterator[None]:
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
        part = self._parts.part(num_samples, weight, loss_scale)
        recording = self._source.recording(num_samples) if self._measures_now else None
        with self._parts.context(part, recording):
            yield

    @torch.no_grad()
    def step(self, *, grad_scale: Tensor | float | None = None) -> None:
        """Takes one measurement. Call it once per optimizer step, on every process.

        ``.grad`` must hold the step's whole gradient and nothing else: after the last backward
        pass, before clipping and before ``optimizer.step()``.

        Args:
            grad_scale: Loss scale still in ``.grad``; 1 after ``scaler.unscale_``. Default: that
                of the last micro-batch; ``LayerwiseGradScaler`` knows it.

        Raises:
            InputError: If the step has fewer than two parts, unequal ones for ``"l1"``, or two that
                are passes over one forward pass; once a step had what it needs, such a step is
                left out and counted in ``skipped``.
        """
        if not self._measures_now:
            self._count(self._steps + 1)
            return
        self._parts.borders.finish()
        wrong = self._parts.wrong()
        if wrong is None:
            self._whole = True
        else:
            self._parts.broken = True
            # A short window at an epoch's end is no mistake, and is left out.
            wrong = None if self._whole else wrong
        try:
            # The other processes wait in the collective, so this one joins it before it raises.
            if wrong is None or self.world.size > 1:
                self._measure(self._loss_scale.of_gradients(grad_scale))
        finally:
            self._begin(self._steps + 1)
        if wrong is not None:
            raise wrong

    def drop_step(self) -> None:
        """Forgets the micro-batches since the last step, whose gradients are thrown away.

        For a loop that calls ``zero_grad()`` without a step, as after a loss that is not finite or
        a backward pass for a diagnosis. What could have been measured counts in ``skipped``, as a
        step that was left out for what its gradients were. On several processes each must drop the
        same step.
        """
        self._parts.borders.finish()
        if self._measures_now and not self._parts.broken and self._parts.wrong() is None:
            self._history.drop()
        self._begin(self._steps)

    def _measure(self, scale: Tensor | float) -> None:
        measured, altered = self._meter.measure(self._parts.step(), scale)
        self._history.push(measured)
        self._alterations.note(altered)

    def estimate(self) -> NoiseEstimate:
        """The noise scale from the measurements so far, whole and by group.

        Returns:
            Tensors; nothing waits for the device until one is read.
        """
        return self._history.estimate(altered=self.altered.clone(), unlike=self._likeness.differ)

    def reset(self) -> None:
        """Forgets every measurement, as after a change of the learning rate."""
        self._history.reset()
        self._likeness.state.zero_()
        self._begin(0)

    def remove(self) -> None:
        """Takes every hook off the model; the estimate stays."""
        self._remove()

    def state_dict(self) -> dict[str, Any]:
        """The measurements, the same on every process; to be saved between steps."""
        altered = self.altered.clone()
        likeness = self._likeness.state.clone()
        history = self._history.state_dict()
        return {**history, "steps": self._steps, "altered": altered, "likeness": likeness}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts saved measurements back; a step that had begun is forgotten.

        Raises:
            InputError: If they are of other groups or another history.
        """
        self._history.load_state_dict(state)
        self.altered.copy_(torch.as_tensor(state.get("altered", 0)))
        self._likeness.state.copy_(torch.as_tensor(state.get("likeness", 0)))
        self._begin(int(state.get("steps", 0)))
