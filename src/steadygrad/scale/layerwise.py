"""A gradient scaler with a scale for each chosen layer."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.scale.build import bound, set_up
from steadygrad.scale.findings import Findings, MeasuredExponents
from steadygrad.scale.gradients import known
from steadygrad.scale.options import AutoScale, LayerScale, Rule, check_scale
from steadygrad.scale.state import read_state, table_state
from steadygrad.scale.usage import Usage

__all__ = ["LayerwiseGradScaler"]


class LayerwiseGradScaler:
    r"""Scales the gradients of chosen layers, each by a scale of its own, and nothing else.

    .. code-block:: python

        scaler = LayerwiseGradScaler(model, {"stem": 2**10, "blocks.*": 2**8})
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)          # optional: before gradients are clipped or looked at
        scaler.step(optimizer)
        scaler.update()

    The life cycle is that of ``torch.amp.GradScaler``. Boundaries around each chosen module
    multiply the gradient that enters it from its outputs by the scale and divide what leaves at
    its inputs, so what flows outside is exact, whatever the topology; chosen modules inside chosen
    modules multiply. Where chosen modules follow each other directly their scales are exchanged in
    one step: the plain gradient between them never exists, and need not be representable.

    A value that is not finite is counted for the layer where it arose and goes no further; the
    step is left out for all layers on all processes, and that layer's scale backs off. With
    ``layer_scales={}`` and an ``init_scale`` this is ``torch.amp.GradScaler``, to the bit.

    No forward pass may lie on the other side of an ``update`` from its backward pass. Nothing
    waits for the device, but for ``step`` with an optimizer that cannot skip a step by itself, as
    in torch; ``fused=True`` optimizers of torch and those of steadygrad can. Build the scaler
    before a compiled model is called for the first time.

    Args:
        model: The model. Wrapped, sharded or compiled before or after.
        layer_scales: Scales or :class:`LayerScale` by patterns of module names (parts between dots
            are compared one by one: ``*`` is any one part or a piece of it, ``**`` any number of
            parts; of several that match the last one counts); or ``"auto"`` or an
            :class:`AutoScale`: found and followed from measured exponents.
        growth_factor: Multiplies a scale after ``growth_interval`` finite steps in its layer.
        backoff_factor: Multiplies it after a step with a non-finite value from its layer.
        growth_interval: Number of steps.
        min_scale: Least scale.
        max_scale: Largest scale.
        init_scale: First scale of the loss, around all layers; it moves by the same rule. None:
            the loss is not scaled, but with ``"auto"`` its scale begins at 1.
        process_group: Processes that must skip a step together, by one collective a step:
            ``"all"``, a process group, or None for this one alone.
        enabled: False: every method does what it would without scaling.

    Raises:
        InputError: If an argument is wrong, a pattern matches nothing, or a parameter would be
            under two different scales.

    References:
        | Zero-Shot Text-to-Image Generation (Ramesh et al., 2021), section 2.4: a scale for each
        | residual block
        | https://arxiv.org/abs/2102.12092
    """

    def __init__(
        self,
        model: nn.Module,
        layer_scales: "Mapping[str, float | LayerScale] | AutoScale | str" = "auto",
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 10_000,
        min_scale: float = 2.0**-126,
        max_scale: float = 2.0**126,
        *,
        init_scale: float | None = None,
        process_group: Any = "all",
        enabled: bool = True,
    ) -> None:
        rule = Rule(
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            min_scale=min_scale,
            max_scale=max_scale,
        )
        setup = set_up(model, layer_scales, rule, init_scale)
        self._layers, self._table, self._auto = setup.layers, setup.table, setup.auto
        self._table.enabled = enabled
        self._boundaries = bound(self._layers, self._table) if enabled else {}
        self._steps, self._wanted = 0, False
        self._skipped = torch.zeros((), dtype=torch.int64, device=self._table.own.device)
        self._last: Tensor | None = None
        self._usage = Usage(self._layers, self._table, self._auto is not None)
        self._findings = Findings(
            self._layers, self._table, self._boundaries, self._usage, process_group
        )
        self._begin()

    def _begin(self) -> None:
        """Starts a step."""
        self._usage.done()
        self._findings.begin()
        self.measure(self._wanted)

    @property
    def skipped(self) -> Tensor:
        """Steps left out because a value was not finite, with shape ``()``."""
        return self._skipped

    @property
    def measured(self) -> MeasuredExponents | None:
        """Exponents of the last measured step; None before there is one."""
        return self._findings.measured

    def measure(self, active: bool = True) -> None:
        """Says whether all passes to come are measured; otherwise only ``auto`` decides."""
        self._wanted = active
        due = self._auto is not None and self._auto.due(self._steps)
        self._table.measure(self._table.enabled and (due or active))

    def scale(self, outputs: Any) -> Any:
        """Multiplies the loss by its own scale; in the first step its graph is looked at.

        Args:
            outputs: A tensor, or an iterable of tensors.

        Raises:
            InputError: If a chosen module's weights are used without calling it, or what it kept
                from inside is.
        """
        if not self._table.enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._usage.look(outputs)
            return outputs * self._table.own[0].to(outputs.device, non_blocking=True)
        if isinstance(outputs, Iterable) and not isinstance(outputs, (str, bytes)):
            scaled = (self.scale(output) for output in outputs)
            return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled
        raise InputError(
            "Parameter `outputs` should be a tensor or an iterable of tensors. Found "
            f"{type(outputs).__name__}. Remedy: hand in the loss."
        )

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides the gradients by the scales they carry, once a step.

        float16 gradients become float32 where the optimizer keeps float32 masters; elsewhere they
        are rounded to float16, and may be too small for it.

        Args:
            optimizer: Whose gradients.

        Raises:
            RuntimeError: If it was done already, or the step was taken.
            InputError: If a chosen module has a gradient but was not called.
        """
        if not self._table.enabled:
            return
        stage = self._findings.stages.get(id(optimizer))
        if stage is not None:
            raise RuntimeError(
                f"Expected one unscale_() and one step() between two update() calls. Found this "
                f"optimizer {stage} already. Remedy: call update() at the end of each step."
            )
        self._findings.take(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscales, if that is still to be done, and takes the optimizer's step, or leaves it out.

        Args:
            optimizer: The optimizer.
            *args: Handed on.
            **kwargs: Handed on.

        Returns:
            What ``optimizer.step`` returns; None where the step was left out.

        Raises:
            RuntimeError: If the step was taken already, or a closure is handed in.
        """
        if not self._table.enabled:
            return optimizer.step(*args, **kwargs)
        if kwargs.get("closure") is not None or any(callable(arg) for arg in args):
            raise RuntimeError(
                "Expected a step without a closure. Found one. Remedy: evaluate the loss before "
                "scaler.step(optimizer)."
            )
        if self._findings.stages.get(id(optimizer)) != "unscaled":
            self.unscale_(optimizer)
        return self._findings.step(optimizer, *args, **kwargs)

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scales; to be called at the end of every step.

        Args:
            new_scale: A scale for the loss to use from now on; the others stay. Default: every
                scale moves by its rule.

        Raises:
            RuntimeError: If no gradients were looked at in this step.
        """
        if not self._table.enabled:
            return
        found = self._findings.found()
        if new_scale is not None:
            if not isinstance(new_scale, Tensor):
                check_scale("new_scale", new_scale)
            self._table.own[0] = new_scale
            self._table.changed()
        elif found is None:
            raise RuntimeError(
                "Expected gradients that were unscaled since the last update(). Found none. "
                "Remedy: call step(optimizer), or unscale_(optimizer), before update()."
            )
        else:
            self._last, bad = found, known(found.any())
            self._table.update(found, bad, self._findings.counts, self._auto)
            if bad != 0:
                self._skipped += found.any()
            self._steps += 1
        self._begin()

    def get_scale(self) -> float:
        """The scale of the loss; waits for the device."""
        return self._table.own[0].item() if self._table.enabled else 1.0

    def get_scales(self) -> dict[str, float]:
        """Each layer's own scale by its name, the loss's by ``""``; waits for the device."""
        return dict(zip(self._table.names, self._table.own.tolist(), strict=True))

    def left_out(self) -> list[str]:
        """Layers that count as part of what lies around them: no scale but one would be right.

        Known after the first ``scale``: with ``"auto"``, or scales that are fixed at one, those
        with weights or inner values that are used without passing their boundaries.
        """
        return [self._table.names[i] for i in sorted(self._usage.left_out)]

    def get_overflows(self) -> dict[str, int]:
        """In how many steps something not finite arose in each layer; waits for the device."""
        return dict(zip(self._table.names, self._table.overflows.tolist(), strict=True))

    def culprits(self) -> list[str]:
        """Layers where something not finite arose in the last step; waits for the device.

        ``""`` stands for everything outside the chosen modules: the loss, and what lies between.
        """
        bad = [] if self._last is None else self._last.tolist()
        return [name for name, wrong in zip(self._table.names, bad, strict=False) if wrong]

    def is_enabled(self) -> bool:
        """Whether gradients are scaled."""
        return self._table.enabled

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on every process; to be saved after ``update``."""
        if not self._table.enabled:
            return {}
        return {
            "layers": table_state(self._table),
            "steps": self._steps,
            "skipped": self._skipped.item(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; a step that had begun is forgotten.

        The rules stay as they were given to the constructor. A state of ``torch.amp.GradScaler``
        sets the loss's scale.

        Raises:
            InputError: If the state is of other layers.
        """
        if not self._table.enabled:
            return
        ours = read_state(self._table, state)
        if ours is not None:
            self._steps = int(ours["steps"])
            self._skipped.fill_(ours["skipped"])
        self._last = None
        self._usage.forget()
        self._begin()

    def remove(self) -> None:
        """Takes every boundary off the model; the scaler must not be used any more."""
        for boundary in self._boundaries.values():
            boundary.remove()
        self._table.enabled = False
