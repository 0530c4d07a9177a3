"""A gradient scaler with a scale for each chosen layer."""

import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import check_count, check_number, check_type
from steadygrad.averages import check_state
from steadygrad.distributed import World, gather_json, process_world
from steadygrad.numerics import exact
from steadygrad.scale.audit import GraphAudit
from steadygrad.scale.boundary import ScaleHooks, check_no_boundary
from steadygrad.scale.equations import BINS, GrowthRule, exponent_histogram
from steadygrad.scale.layers import LOSS, AutoScale, Layers, LayerScale, check_scale, choose_layers
from steadygrad.scale.table import ScaleTable
from steadygrad.shards import local


class MeasuredExponents(NamedTuple):
    """Counts the exponents of one step's scaled gradients; rows are layers, the loss first.

    Only gradients that are narrower than float32 are counted, or may have been so just before, as
    under autocast: others lose nothing.

    Attributes:
        activations: Counts at the boundaries of the layer, with shape ``(layers, BINS)``.
        weights: Counts in the parameters' gradients, with shape ``(layers, BINS)``.
        scales: What the layers' gradients were multiplied by, with shape ``(layers)``.
    """

    activations: Tensor
    weights: Tensor
    scales: Tensor


class LayerwiseGradScaler:
    r"""Scales the gradients of chosen layers, each by a scale of its own, and nothing else.

    The life cycle is that of ``torch.amp.GradScaler``, and with ``layer_scales={}`` and an
    ``init_scale`` so is all else, bit for bit. Gradients are scaled inside the chosen modules and
    exact outside, whatever the topology; chosen modules inside chosen modules multiply. A value
    that is not finite is counted for the layer where it arose and goes no further; the step is left
    out for all layers on all processes, and that layer's scale backs off.

    Nothing waits for the device but ``step`` with an optimizer that cannot skip a step by itself,
    as in torch; ``fused=True`` optimizers of torch and those of steadygrad can. Do not call
    ``update`` between a forward pass and its backward pass. Build the scaler before a compiled
    model is called for the first time.

    Args:
        model: The model. Wrapped, sharded or compiled before or after.
        layer_scales: Scales or :class:`LayerScale` by patterns of module names (``*`` is any one
            part between dots or a piece of it, ``**`` any number of parts; the last match counts);
            ``"auto"`` or an :class:`AutoScale`: found and followed from measured exponents.
        growth_factor: Multiplies a scale after ``growth_interval`` finite steps in its layer.
        backoff_factor: Multiplies it after a step with a non-finite value from its layer.
        growth_interval: Number of steps.
        min_scale: Least scale.
        max_scale: Largest scale.
        init_scale: First scale of the loss, around all layers; it moves by the same rule. None:
            the loss is not scaled, but with ``"auto"`` its scale begins at 1.
        process_group: Processes that skip a step together, by one collective a step: ``"all"``, a
            group, or None for this one alone. Layers of one name count as one.
        enabled: False: every method does what it would without scaling.

    Attributes:
        skipped: Number of steps skipped because a value was not finite, with shape ``()``.
        measured: Exponents of the last measured step; None before there is one.

    Raises:
        InputError: If an argument is wrong, a pattern matches nothing, a parameter would be under
            two different scales, or a chosen module is another scaler's, or lies in or around one.

    References:
        | Zero-Shot Text-to-Image Generation (Ramesh et al., 2021), section 2.4
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
        loss = LayerScale(1.0, fixed=True)
        if init_scale is not None:
            loss = LayerScale(check_scale("init_scale", init_scale))
        check_number("growth_factor", growth_factor, low=1)
        check_number("backoff_factor", backoff_factor, low=0, high=1, low_open=True)
        check_count("growth_interval", growth_interval)
        check_scale("max_scale", max_scale)
        check_number("min_scale", min_scale, low=0, high=max_scale, low_open=True)
        rule = GrowthRule(growth_factor, backoff_factor, growth_interval, min_scale, max_scale)
        layer_scales = AutoScale() if layer_scales == "auto" else layer_scales
        self._auto = layer_scales if isinstance(layer_scales, AutoScale) else None
        if self._auto is not None:
            # Measurements take the place of growth.
            loss, rule = replace(loss, fixed=False), rule._replace(growth_factor=1.0)
        chosen, scales = choose_layers(model, layer_scales)
        self._layers = Layers(model, chosen)
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._table = ScaleTable(self._layers, [loss, *scales], rule, device)
        self._table.enabled = enabled
        self._audit = GraphAudit(self._layers, self._table, self._auto is not None)
        self._sum = LayerSum(self._layers.names, process_group)
        self._steps, self._measure_all = 0, False
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        # What get_scale() says.
        self._announced = self._table.scales[0].to(exact(device), copy=True)
        self._last_nonfinite: Tensor | None = None
        self.measured: MeasuredExponents | None = None
        self._begin_step()
        chosen = chosen if enabled else {}
        check_no_boundary(model, chosen)
        modules = enumerate(chosen.values(), start=1)
        self._hooks = [ScaleHooks(m, i, self._layers, self._table) for i, m in modules]
        for hooks in self._hooks:
            # A scaler that is dropped leaves no boundaries behind.
            weakref.finalize(self, hooks.remove).atexit = False

    def _begin_step(self) -> None:
        # Flags of all processes' layers, for each optimizer that was unscaled; exponents.
        self._nonfinite: dict[Optimizer, Tensor] = {}
        self._stepped: set[Optimizer] = set()
        self._counts: Tensor | None = None
        self._audit.end_step()
        self._table.clear()
        self.measure(self._measure_all)

    def measure(self, active: bool = True) -> None:
        """Measures all passes to come, or only ``auto``'s; call it on all processes."""
        auto, self._measure_all = self._auto, active
        due = auto is not None and (self._steps < auto.warmup or self._steps % auto.every == 0)
        self._table.measuring = self._table.enabled and (due or active)

    def scale(self, outputs: Any) -> Any:
        """Multiplies the loss by its own scale; in the first step it audits the loss's graph.

        Only backward passes of what it returns, a tensor or an iterable of tensors, count: those of
        others' losses move no scale.

        Raises:
            InputError: If weights of a chosen module, or tensors that it saved inside its forward
                pass, are used outside of it.
        """
        if not self._table.enabled:
            return outputs
        if isinstance(outputs, Tensor):
            self._audit.inspect(outputs)
            loss = outputs * self._table.scales[0].to(outputs.device, non_blocking=True)
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
        table = self._table
        if not table.enabled:
            return
        if optimizer in self._nonfinite:
            raise RuntimeError(
                "Expected one unscale_() or step() of an optimizer a step. Found another one. "
                "Remedy: call update() at the end of each step."
            )
        table.collect()
        gradients = take_gradients(optimizer, self._layers, self._audit)
        uncalled = self._audit.uncalled((layer, values) for layer, values, _ in gradients)
        # What travels: a flag, and two histograms in a measured step.
        rows = [table.counts, count_exponents(gradients, table.counts)] if table.measuring else []
        flags = table.nonfinite + unscale_gradients(gradients, table.inverse_totals)
        everywhere = self._sum(torch.cat([flags[:, None], *rows], dim=1))
        if uncalled is not None:
            # Not before: the other processes would wait in the collective.
            raise uncalled
        self._nonfinite[optimizer] = everywhere[:, 0]
        if rows:
            activations, weights = self._sum.here(everywhere)[:, 1:].split(BINS, dim=1)
            if self._counts is not None and self.measured is not None:
                # Another optimizer of this step: the boundaries are the same, the weights are not.
                weights = weights + self.measured.weights
            self.measured = MeasuredExponents(activations, weights, table.totals.clone())
            self._counts = activations + weights

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
            raise RuntimeError("Expected no closure. Found one. Remedy: evaluate the loss before.")
        if optimizer not in self._nonfinite or optimizer in self._stepped:
            self.unscale_(optimizer)
        # Fused optimizers skip at exactly 1.
        found_inf = self._nonfinite[optimizer].any().float()
        self._stepped.add(optimizer)
        if not getattr(optimizer, "_step_supports_amp_scaling", False):
            # The one wait there is, and only for optimizers that cannot skip by themselves.
            return None if found_inf.item() else optimizer.step(*args, **kwargs)
        optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
        try:
            return optimizer.step(*args, **kwargs)
        finally:
            del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]

    @torch.no_grad()
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Moves the scales; call it at the end of every step.

        Given a new scale, the loss has it from now on, and the others stay.

        Raises:
            RuntimeError: If no gradients were unscaled in this step.
        """
        if not self._table.enabled:
            return
        if new_scale is not None:
            scales, given = self._table.scales.clone(), isinstance(new_scale, Tensor)
            scales[0] = new_scale if given else check_scale("new_scale", new_scale)
            self._table.set_scales(scales)
            self._announced.copy_(scales[0])
        elif not self._nonfinite:
            raise RuntimeError(
                "Expected unscaled gradients. Found none. Remedy: call step(optimizer), or "
                "unscale_(optimizer), before update()."
            )
        else:
            nonfinite = torch.stack([*self._nonfinite.values()]).sum(dim=0) > 0
            self._table.update(self._sum.here(nonfinite), self._counts, self._auto)
            self._last_nonfinite = nonfinite
            skipped, before, loss = nonfinite.any(), self._announced, self._table.scales[0]
            # Halved where another layer backed off, or a bound held the loss's scale.
            fallen = torch.where(loss < before, loss, before / 2)
            # Measurements lower it in steps that are taken, too.
            kept = loss if self._auto is None else torch.maximum(before, loss)
            before.copy_(torch.where(skipped, fallen, kept))
            self.skipped += skipped
            self._steps += 1
        self._begin_step()

    def get_scale(self) -> float:
        """Returns a number that falls in each skipped step, by which trainers know it.

        ``get_scales()[""]`` is always the loss's scale, and this one is unless the two moved
        otherwise. Waits for the device.
        """
        return self._announced.item() if self._table.enabled else 1.0

    def get_scales(self) -> dict[str, float]:
        """Returns each layer's own scale by name, the loss's by ``""``; waits for the device."""
        return {name: row["scale"] for name, row in self._table.state_dict().items()}

    def parameter_scales(self, parameters: Sequence[Tensor]) -> Callable[[], Tensor]:
        """Returns a function: the scale that each gradient carries now, with shape ``(n)``.

        One where ``unscale_`` has taken it out. NaN for all after a value in this step that was not
        finite: boundaries keep it from the gradients behind them. Nothing waits for the device.
        """
        table = self._table
        layers = [layer or LOSS for layer in self._layers.layers_of(parameters)]
        rows = torch.tensor(layers, device=table.scales.device)
        if not table.enabled:
            return lambda: torch.ones(len(rows), device=rows.device)

        def carried() -> Tensor:
            table.collect()
            groups = [group for optimizer in self._nonfinite for group in optimizer.param_groups]
            unscaled = {id(p) for group in groups for p in group["params"]}
            done = torch.tensor([id(p) in unscaled for p in parameters])
            done = done.to(rows.device, non_blocking=True)
            scales = torch.where(done, 1.0, table.totals[rows])
            return torch.where(table.nonfinite.any(), torch.nan, scales)

        return carried

    def get_overflows(self) -> dict[str, int]:
        """Counts the steps with a non-finite value in each layer; waits for the device."""
        return {name: int(row["overflows"]) for name, row in self._table.state_dict().items()}

    def culprits(self) -> list[str]:
        """Lists layers where a value was not finite in the last step; waits for the device.

        ``""`` is everything outside the chosen modules. Other processes' layers are named, too.
        """
        flags = [] if self._last_nonfinite is None else self._last_nonfinite.tolist()
        return [name for name, bad in zip(self._sum.names, flags, strict=False) if bad]

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
        """Continues from a saved state, by the rules given to the constructor.

        A state of ``torch.amp.GradScaler`` sets the loss's scale. A step under way is forgotten.

        Raises:
            InputError: If the state is of other layers, or damaged; then nothing has changed.
        """
        if not self._table.enabled:
            return
        check_type("state", state, Mapping, "what state_dict() returned")  # type: ignore[type-abstract]
        now = self.state_dict()
        if "scale" in state:
            loss = {"scale": state["scale"], "growth_tracker": state.get("_growth_tracker", 0)}
            state = now | {"layers": now["layers"] | {"": now["layers"][""] | loss}}
        counts = {name: state.get(name, 0) for name in ("steps", "skipped")}
        check_state("state", counts, dict.fromkeys(counts, 0))
        self._table.load_state_dict(state.get("layers"))
        self._steps = counts["steps"]
        self.skipped.fill_(counts["skipped"])
        self._announced.copy_(self._table.scales[0])
        self._last_nonfinite = None
        self._audit = GraphAudit(self._layers, self._table, self._auto is not None)
        self._begin_step()

    def remove(self) -> None:
        """Takes every boundary off the model; the scaler must not be used any more."""
        for hooks in self._hooks:
            hooks.remove()
        self._table.enabled = False


def take_gradients(
    optimizer: Optimizer, layers: Layers, audit: GraphAudit
) -> list[tuple[int, Tensor, bool]]:
    """Lists an optimizer's gradients: layer, local values, whether they are or were narrow."""
    pairs = [(group, p) for group in optimizer.param_groups for p in group["params"]]
    found = layers.layers_of([parameter for _, parameter in pairs])
    gradients = []
    for (group, parameter), layer in zip(pairs, found, strict=True):
        if (gradient := parameter.grad) is None:
            continue
        # How steadygrad's optimizers, and others, say that they keep float32 masters.
        masters = group.get("master_weights", False) is not False
        if masters and gradient.dtype == torch.float16:
            # An unscaled gradient may be too small for float16.
            parameter.grad, parameter.grad_dtype = None, None
            parameter.grad = gradient = gradient.to(torch.float32)
        if gradient.is_sparse:
            # First: adding up duplicates may overflow, and the check must see the sums.
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        narrow = audit.may_be_narrow(parameter, gradient)
        # The loss's scale is around the parameters of other models, too.
        gradients.append((layer or LOSS, local(gradient), narrow))
    return gradients


@torch.no_grad()
def unscale_gradients(gradients: Sequence[tuple[int, Tensor, bool]], inverse: Tensor) -> Tensor:
    """Multiplies gradients in place by reciprocals, ``(layers)``; flags layers not finite by 1."""
    nonfinite, alike = torch.zeros_like(inverse), defaultdict(list)
    for layer, values, _ in gradients:
        alike[layer, values.device, values.dtype].append(values)
    for (layer, device, _), part in alike.items():
        # Set where a value is not finite, and left as it was elsewhere.
        flag, factor = nonfinite[layer].to(device), inverse[layer].to(device)
        torch._amp_foreach_non_finite_check_and_unscale_(part, flag, factor)
        if device != nonfinite.device:
            nonfinite[layer].copy_(flag)
    return nonfinite


def count_exponents(gradients: Sequence[tuple[int, Tensor, bool]], like: Tensor) -> Tensor:
    """Counts exponents of each layer's narrow gradients, with shape ``(layers, BINS)``."""
    counts = like.new_zeros(len(like), BINS)
    for layer, values, narrow in gradients:
        if narrow:
            counts[layer] += exponent_histogram(values).to(like.device)
    return counts


class LayerSum:
    """Adds up rows by the names of layers, which may differ between processes, as in a pipeline."""

    def __init__(self, names: list[str], group: Any) -> None:
        process_world(group)  # refuses what is none
        self.names, self._here, self._group = names, names, group
        self._world: World | None = None

    def __call__(self, rows: Tensor) -> Tensor:
        """Adds up the rows of this process's layers; returns those of all processes' layers."""
        world = process_world(self._group)
        if world != self._world:
            gathered = gather_json(self._here, world, rows.device)
            self.names = list(dict.fromkeys(name for names in gathered for name in names))
            places = [self.names.index(name) for name in self._here]
            self._world, self._places = world, torch.tensor(places, device=rows.device)
        spread = rows.new_zeros(len(self.names), rows.shape[1])
        return world.sum(spread.index_copy_(0, self._places, rows))

    def here(self, rows: Tensor) -> Tensor:
        """Selects this process's layers from rows of all processes' layers."""
        return rows[self._places]
