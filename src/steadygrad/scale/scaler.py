"""A gradient scaler with a scale for each chosen layer."""

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import check_type
from steadygrad.scale.audit import GraphAudit
from steadygrad.scale.boundary import ScaleHooks, check_no_boundary
from steadygrad.scale.choose import choose_layers
from steadygrad.scale.options import AutoScale, LayerScale, check_layer_scales, check_scale
from steadygrad.scale.table import ScaleTable, check_saved_count
from steadygrad.scale.unscale import MeasuredExponents, StepUnscaler

__all__ = ["LayerwiseGradScaler"]


class LayerwiseGradScaler:
    r"""Scales the gradients of chosen layers, each by a scale of its own, and nothing else.

    .. code-block:: python

        scaler = LayerwiseGradScaler(model, {"stem": 2**10, "blocks.*": 2**8})
        with torch.autocast("cuda", torch.float16):
            loss = loss_of(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)          # optional: before gradients are clipped or read
        scaler.step(optimizer)
        scaler.update()

    The life cycle is that of ``torch.amp.GradScaler``. Boundaries around each chosen module
    multiply the gradient that enters it from its outputs by the scale and divide what leaves at
    its inputs, so what flows outside is exact, whatever the topology; chosen modules inside chosen
    modules multiply.

    A value that is not finite is counted for the layer where it arose and goes no further; the
    step is left out for all layers on all processes, and that layer's scale backs off. With
    ``layer_scales={}`` and an ``init_scale`` this is ``torch.amp.GradScaler``, bit for bit.

    Do not call ``update`` between a forward pass and its backward pass. Nothing waits for the
    device but ``step`` with an optimizer that cannot skip a step by itself, as in torch;
    ``fused=True`` optimizers of torch and those of steadygrad can. Build the scaler before a
    compiled model is called for the first time.

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
            ``"all"``, a process group, or None for this one alone. They may have other layers, as
            the stages of a pipeline do; layers of one name count as one.
        enabled: False: every method does what it would without scaling.

    Attributes:
        skipped: Number of steps skipped because a value was not finite, with shape ``()``.

    Raises:
        InputError: If an argument is wrong, a pattern matches nothing, a parameter would be under
            two different scales, or a chosen module is another scaler's, or lies in or around one.

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
        check_type("model", model, nn.Module, "hand in the model first, then the scales")
        first = 1.0 if init_scale is None else check_scale("init_scale", init_scale)
        rule = LayerScale(
            first, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
        ).checked()
        checked = check_layer_scales(layer_scales)
        self._auto = checked if isinstance(checked, AutoScale) else None
        layers, rules = choose_layers(model, checked, rule, init_scale is not None)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._table = ScaleTable(layers, rules, device)
        self._table.enabled = enabled
        chosen = range(1, len(layers.layers)) if enabled else ()
        check_no_boundary(model, [layers.layers[index] for index in chosen])
        self._audit = GraphAudit(layers, self._table, self._auto is not None)
        self._unscaler = StepUnscaler(layers, self._table, self._audit, process_group)
        self._steps, self._measure_all = 0, False
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self._last_nonfinite: Tensor | None = None
        self._begin_step()
        self._hooks = [ScaleHooks(index, layers, self._table) for index in chosen]
        for hooks in self._hooks:
            # A scaler that is dropped leaves no boundaries behind.
            weakref.finalize(self, hooks.remove).atexit = False

    def _begin_step(self) -> None:
        self._audit.end_step()
        self._unscaler.begin()
        self.measure(self._measure_all)

    @property
    def measured(self) -> MeasuredExponents | None:
        """Exponents of the last measured step; None before there is one."""
        return self._unscaler.measured

    def measure(self, active: bool = True) -> None:
        """Measures all passes to come, or only ``auto``'s; call it on all processes."""
        self._measure_all = active
        due = self._auto is not None and self._auto.due(self._steps)
        self._table.measuring = self._table.enabled and (due or active)

    def scale(self, outputs: Any) -> Any:
        """Multiplies the loss by its own scale; in the first step it audits the loss's graph.

        Only backward passes of what it returns count: those of others' losses move no scale.

        Args:
            outputs: A tensor, or an iterable of tensors.

        Raises:
            InputError: If weights of a chosen module, or tensors that it saved inside its forward
                pass, are used outside of it.
        """
        if not self._table.enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._audit.inspect(outputs)
            loss = outputs * self._table.own[0].to(outputs.device, non_blocking=True)
            if loss.requires_grad and not torch.compiler.is_compiling():
                self._table.mark(loss)
            return loss
        check_type("outputs", outputs, Iterable, "hand in the loss")  # type: ignore[type-abstract]
        scaled = (self.scale(output) for output in outputs)
        return type(outputs)(scaled) if isinstance(outputs, (list, tuple)) else scaled

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divides an optimizer's gradients by the scales they carry, once a step.

        float16 gradients become float32 where the optimizer keeps float32 masters; elsewhere they
        are rounded to float16, and may be too small for it.

        Raises:
            RuntimeError: If it was done already, or the step was taken.
            InputError: If a chosen module has a gradient but was not called.
        """
        if self._table.enabled:
            self._unscaler.unscale(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Takes the optimizer's step, or skips it; first unscales gradients that are still scaled.

        Returns:
            What ``optimizer.step(*args, **kwargs)`` returns; None where the step was skipped.

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
        if self._unscaler.stages.get(optimizer) != "unscaled":
            self.unscale_(optimizer)
        return self._unscaler.step(optimizer, *args, **kwargs)

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scales; call it at the end of every step.

        Args:
            new_scale: A scale for the loss to use from now on; the others stay. Default: every
                scale moves by its rule.

        Raises:
            RuntimeError: If no gradients were unscaled in this step.
        """
        if not self._table.enabled:
            return
        nonfinite = self._unscaler.nonfinite()
        if new_scale is not None:
            if not isinstance(new_scale, Tensor):
                check_scale("new_scale", new_scale)
            own = self._table.own.clone()
            own[0] = new_scale
            self._table.set_scales(own)
        elif nonfinite is None:
            raise RuntimeError(
                "Expected gradients that were unscaled since the last update(). Found none. "
                "Remedy: call step(optimizer), or unscale_(optimizer), before update()."
            )
        else:
            own = self._unscaler.own(nonfinite)
            self._table.update(own, self._unscaler.counts, self._auto)
            self._last_nonfinite = nonfinite
            self.skipped += nonfinite.any()
            self._steps += 1
        self._begin_step()

    def get_scale(self) -> float:
        """Returns the scale of the loss; waits for the device."""
        return self._table.own[0].item() if self._table.enabled else 1.0

    def get_scales(self) -> dict[str, float]:
        """Returns each layer's own scale by name, the loss's by ``""``; waits for the device."""
        return {name: row["scale"] for name, row in self._table.state_dict().items()}

    def parameter_scales(self, parameters: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Returns a function: the scale that each gradient carries now, with shape ``(n)``.

        One where ``unscale_`` has taken it out. NaN for all after a value in this step that was not
        finite: boundaries keep it from the gradients behind them. Nothing waits for the device.
        """
        if not self._table.enabled:
            return lambda: torch.ones(len(parameters), device=self._table.own.device)
        return self._unscaler.carried_scales(parameters)

    def left_out(self) -> list[str]:
        """Lists layers that count as part of their parents; known after the first ``scale``.

        Their weights or inner values are used without passing their boundaries.
        """
        return [self._table.names[i] for i in sorted(self._table.merged)]

    def get_overflows(self) -> dict[str, int]:
        """Counts the steps with a non-finite value in each layer; waits for the device."""
        return {name: int(row["overflows"]) for name, row in self._table.state_dict().items()}

    def culprits(self) -> list[str]:
        """Lists layers where a value was not finite in the last step; waits for the device.

        ``""`` stands for everything outside the chosen modules: the loss, and what lies between.
        Layers that only other processes have are named, too.
        """
        flags = [] if self._last_nonfinite is None else self._last_nonfinite.tolist()
        return [name for name, bad in zip(self._unscaler.names, flags, strict=False) if bad]

    def is_enabled(self) -> bool:
        """Tells whether gradients are scaled."""
        return self._table.enabled

    def state_dict(self) -> dict[str, Any]:
        """Returns plain numbers, alike on processes with the same layers; save after ``update``."""
        if not self._table.enabled:
            return {}
        layers = self._table.state_dict()
        return {"layers": layers, "steps": self._steps, "skipped": self.skipped.item()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from a saved state; a step that had begun is forgotten.

        The rules stay as they were given to the constructor. A state of ``torch.amp.GradScaler``
        sets the loss's scale.

        Raises:
            InputError: If the state is of other layers, or damaged; then nothing has changed.
        """
        if not self._table.enabled:
            return
        if "scale" in state:
            now = self.state_dict()
            loss = {"scale": state["scale"], "growth_tracker": state.get("_growth_tracker", 0)}
            state = now | {"layers": now["layers"] | {"": now["layers"][""] | loss}}
        steps, skipped = (
            check_saved_count(f"state_dict['{name}']", state.get(name, 0))
            for name in ("steps", "skipped")
        )
        self._table.load_state_dict(state.get("layers"))
        self._steps = steps
        self.skipped.fill_(skipped)
        self._last_nonfinite = None
        self._audit.reset()
        self._begin_step()

    def remove(self) -> None:
        """Takes every boundary off the model; the scaler must not be used any more."""
        for hooks in self._hooks:
            hooks.remove()
        self._table.enabled = False
