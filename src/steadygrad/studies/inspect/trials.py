"""The trials of ``inspect``: which there are, their scalers, and what they count.

The phase with one loss scale and the phase that finds scales are independent. The third one needs
both: the scales that it tries are arithmetic on what they recorded.
"""

import math
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler, MeasuredExponents
from steadygrad.scale.equations import BINS, LOWEST, NONFINITE_BIN, largest_exponents
from steadygrad.scale.layers import automatic_layers
from steadygrad.studies.course import Order, generators_kept
from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.analysis import by_phase, propose
from steadygrad.studies.inspect.schema import AFTER, BEFORE, PARTS, PHASES, SEARCH, TITLES, Plan
from steadygrad.studies.schema import SHARE, Trial, evaluation_cost, start_up
from steadygrad.studies.trainer import Trainer
from steadygrad.studies.work import Workplace
from steadygrad.watch import GradientWatch

# Time of a step over that of the steps whose speed was measured: those that overflow are repeated.
REPEATED = 1.2
# As torch.amp.GradScaler begins, and as it moves.
FIRST_SCALE, BACKOFF, INTERVAL = 2.0**16, 0.5, 2000
# Below it float32 has too little room. A loss that changes with every call may lead there: the
# repeated step is another one, and so is finite.
LEAST_SCALE = 2.0**-100
# Gradients that overflow only because they are large are finite at this scale.
PROBE_SCALE = 2.0**-60


def given_scales(
    model: nn.Module, loss_scale: float = FIRST_SCALE, layer_scales: Mapping[str, float] = {}
) -> LayerwiseGradScaler:
    """A loss scale, and scales of some layers; the other layers are measured only.

    Call :func:`follow_one_scale` after each update: without layer scales the loss scale then moves
    as that of ``torch.amp.GradScaler``.
    """
    measured = LayerScale(1.0, fixed=True)
    layers = {name: layer_scales.get(name, measured) for name in automatic_layers(model)}
    scaler = LayerwiseGradScaler(
        model, layers, growth_interval=INTERVAL, backoff_factor=BACKOFF, init_scale=loss_scale
    )
    scaler.measure()
    return scaler


def searched_scales(model: nn.Module) -> LayerwiseGradScaler:
    """A scale for each layer that starts at 1 and follows the measured gradients."""
    scaler = LayerwiseGradScaler(model, AutoScale(scale=1.0, every=1))
    scaler.measure()
    return scaler


# One loss scale to begin with. A forward pass that overflows is a finding.
TRAINING = {"dtype": "float16", "finite": False, "scaling": given_scales}


def plan_for(settings: schema.Settings, trainer: Trainer, *, speed: float, workers: int) -> Plan:
    """The steps that the settings name; without a number as many as the budget has time for."""
    batch, evaluations = trainer.task.batch_size, 2 * evaluation_cost(len(trainer.task.valid))
    span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed / REPEATED
    # Two phases can go side by side.
    chain = len(PHASES) - (workers > 1)
    fitting = int((span - evaluations) / chain / batch)
    most = min(schema.STEPS, fitting // PARTS * PARTS)
    steps = settings.steps or max(schema.LEAST_STEPS, most)
    work = len(PHASES) * steps * batch + evaluations
    return Plan(largest_batch=batch, steps=steps, work=work)


def trials_of(header: schema.Header, results: Results) -> list[Trial]:
    """The phases that can be trained."""
    search = header.plan.steps * header.plan.largest_batch
    evaluated = search + evaluation_cost(header.task.valid_size)
    costs = {BEFORE: evaluated, SEARCH: search}
    trials = [Trial(("phase", name), cost, TITLES[name]) for name, cost in costs.items()]
    if all(results.get(schema.Phase, name) for name in costs):
        found = propose(by_phase(results))
        given = {"loss_scale": found.loss_scale, "layer_scales": found.layer_scales}
        trials.append(Trial(("phase", AFTER), evaluated, TITLES[AFTER], given))
    return trials


def phase(plan: Plan, place: Workplace, phase: schema.PhaseName, **scales: Any) -> schema.Phase:
    """Trains over a phase, and evaluates at its end; ``scales`` are those to try."""
    trainer, searching = place.trainer, phase == SEARCH
    given = partial(given_scales, **scales)
    trainer.scaling = searched_scales if searching else given
    if "torch._dynamo" in sys.modules:
        # A new scaler has new hooks: a compiled model would be compiled once more each time,
        # until the compiler's limit is reached.
        torch.compiler.reset()
    trainer.restart()
    with GradientWatch(trainer.model) as watch:
        train = partial(_train, place, phase, scales.get("layer_scales", {}), watch)
        parts = tuple(train(part) for part in range(PARTS))
    loss = math.nan if searching else place.evaluate()
    return schema.Phase(
        phase=phase,
        parts=parts,
        valid_loss=loss if math.isfinite(loss) else None,
    )


TRIALS = {"phase": phase}


def _train(
    place: Workplace, phase: schema.PhaseName, own: Collection[str], watch: GradientWatch, part: int
) -> schema.Part:
    """Trains over a part, counts its steps, and moves the scales by the rule of the phase."""
    trainer, plan, searching = place.trainer, place.header.plan, phase == SEARCH
    size, device = plan.largest_batch, trainer.context.device
    # Phases see the same data and the same random numbers.
    trainer.seed_everything("train", part)
    first, last = (plan.steps * parts // PARTS for parts in (part, part + 1))
    order = Order(len(trainer.task.train), trainer.seed)
    histograms = ExponentHistograms(trainer.scaler.get_scales())
    before, kept = trainer.scaler.state_dict(), generators_kept(device)
    for end in trainer.run(order, first * size, last * size, size):
        scaler, nonfinite = trainer.scaler, list[str]()
        culprits, measured = scaler.culprits(), scaler.measured
        indices = order.take(end - size, size)
        forward = _forward_fault(watch, trainer, indices) if culprits else None
        if forward is not None:
            # No scale would have prevented it, so none moves.
            scaler.load_state_dict(before)
            histograms.forward[forward] += 1
        elif culprits and not searching:
            nonfinite = nonfinite_at_any_scale(trainer, indices, kept.close)
            follow_one_scale(scaler, culprits, before, own, nonfinite)
            watch.report()  # of the repeated step
        if forward is None:
            histograms.add(measured, culprits, nonfinite)
        before, kept = scaler.state_dict(), generators_kept(device)
        place.advance(size)
    finite = [loss for loss in trainer.look()[first:] if math.isfinite(loss)]
    return histograms.part(
        plain=searching,
        steps=last,
        loss=math.fsum(finite) / len(finite) if finite else None,
        scales={name: math.log2(scale) for name, scale in trainer.scaler.get_scales().items()},
    )


def follow_one_scale(
    scaler: LayerwiseGradScaler,
    culprits: Collection[str],
    before: Mapping[str, Any],
    layer_scales: Collection[str],
    nonfinite: Collection[str],
) -> None:
    """Backs the loss scale off for an overflow in a layer that has no scale of its own.

    Its growth then begins anew, as in torch's scaler. A layer of ``layer_scales`` has backed off by
    itself. An overflow in one that is ``nonfinite`` at any scale moves no scale, nor does the step
    count for growth. ``before`` is the scaler's state before its update.
    """
    state = scaler.state_dict()
    layers, old = state["layers"], before["layers"]
    for name in ("", *nonfinite) if nonfinite else ():
        layers[name].update({key: old[name][key] for key in ("scale", "growth_tracker")})
    if not {*culprits} <= {*layer_scales, *nonfinite}:
        scale = max(LEAST_SCALE, old[""]["scale"] * BACKOFF)
        layers[""].update(scale=scale, growth_tracker=0)
    scaler.load_state_dict(state)


def nonfinite_at_any_scale(
    trainer: Trainer, indices: Tensor, restore_rng: Callable[[], None]
) -> list[str]:
    """Culprits of the step that was just skipped that are not finite whatever the scale.

    It is repeated with a loss scale of 2**-60, no layer scales, and the random numbers that
    ``restore_rng`` brings back. Weights, buffers, scales and random numbers stay as they were.
    """
    scaler, state = trainer.scaler, trainer.scaler.state_dict()
    culprits = scaler.culprits()
    buffers = [(buffer, buffer.clone()) for buffer in trainer.model.buffers()]
    rows = state["layers"].items()
    probe = {name: {**row, "scale": 1.0 if name else PROBE_SCALE} for name, row in rows}
    scaler.load_state_dict({**state, "layers": probe})
    with generators_kept(trainer.context.device):
        restore_rng()
        trainer.backward(indices)
    scaler.unscale_(trainer.optimizer)
    scaler.update()
    again = scaler.culprits()
    trainer.optimizer.zero_grad()
    scaler.load_state_dict(state)
    with torch.no_grad():
        for buffer, kept in buffers:
            buffer.copy_(kept)
    return [name for name in culprits if name in again]


def _forward_fault(watch: GradientWatch, trainer: Trainer, indices: Tensor) -> str | None:
    """The cause of a step that was not finite, if it lies before the backward pass."""
    found, context = watch.report(), trainer.context
    if found is not None and found.in_forward:
        return found.cause
    if math.isfinite(trainer.look()[-1]):
        return None
    with generators_kept(context.device):
        batch = trainer.task.train.batch(context.share(indices))
    leaves = tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)
    nan = any(isinstance(x, Tensor) and bool(x.isnan().any()) for x in leaves)
    more = ", and NaN is in the batch" if any(context.gather(nan)) else ""
    return f"the loss is not finite, though the model's outputs are{more}"


class ExponentHistograms:
    """Adds up the exponents of all steps of a part, with their scales and without.

    Of a skipped step only the values that are not finite are counted: in the layers before the
    overflow the gradients are not those of the batch.
    """

    def __init__(self, names: Iterable[str]) -> None:
        self._names = list(names)
        shape = (2, len(schema.KINDS), len(self._names), BINS)
        self._scaled, self._plain = torch.zeros(shape, dtype=torch.float64)
        self._overflows, self._at_any_scale = Counter[str](), Counter[str]()
        # Steps by a fault before the backward pass: their gradients tell nothing of layers.
        self.forward, self._skipped = Counter[str](), 0
        self._overflowed_at: dict[str, float] = {}

    def add(
        self, measured: MeasuredExponents, culprits: Sequence[str], nonfinite: Sequence[str] = ()
    ) -> None:
        """Counts a step with its culprits, and the culprits that are non-finite at any scale."""
        counts = torch.stack([measured.activations, measured.weights]).cpu()
        scales = measured.scales.cpu().log2()
        self._overflows.update(culprits)
        self._at_any_scale.update(nonfinite)
        for name in (name for name in culprits if name not in nonfinite):
            scale = scales[self._names.index(name)].item()
            self._overflowed_at[name] = min(scale, self._overflowed_at.get(name, scale))
        if culprits:
            self._skipped += 1
            self._scaled[..., NONFINITE_BIN] += counts[..., NONFINITE_BIN]
        else:
            self._scaled += counts
            self._plain += _moved(counts, -scales)

    def part(self, *, plain: bool, **rest: Any) -> schema.Part:
        """The counts of a part; layers without any value of a kind are left out."""
        scaled, unscaled = (
            {kind: self._by_name(counts[i]) for i, kind in enumerate(schema.KINDS)}
            for counts in (self._scaled, self._plain)
        )
        largest = dict[str, dict[str, float]]()
        for i, kind in enumerate(schema.KINDS):
            rows = zip(self._names, largest_exponents(self._plain[i]).tolist(), strict=True)
            largest[kind] = {name: exponent for name, exponent in rows if name in scaled[kind]}
        return schema.Part(
            skipped=self._skipped + self.forward.total(),
            forward=dict(self.forward),
            overflows=dict(self._overflows),
            at_any_scale=dict(self._at_any_scale),
            overflowed_at=self._overflowed_at,
            plain=unscaled if plain else {kind: {} for kind in schema.KINDS},
            largest=largest,
            **(rest | scaled),
        )

    def _by_name(self, counts: Tensor) -> dict[str, schema.Histogram]:
        rows = zip(self._names, counts, strict=True)
        return {name: _histogram(row) for name, row in rows if row.any()}


def _moved(counts: Tensor, log2_scales: Tensor) -> Tensor:
    """Counts of the values multiplied by the layers' scales, however large or small they get."""
    place = torch.arange(BINS) + log2_scales.round().to(torch.int64)[:, None]
    place = place.clamp(1, NONFINITE_BIN - 1)
    # Zeros stay zero, and values that are not finite stay so.
    place[:, 0], place[:, NONFINITE_BIN] = 0, NONFINITE_BIN
    return torch.zeros_like(counts).scatter_add_(2, place.expand(len(counts), -1, -1), counts)


def _histogram(row: Tensor) -> schema.Histogram:
    zero, *finite, over = (round(count) for count in row.tolist())
    places = [place for place, count in enumerate(finite) if count]
    first, last = (places[0], places[-1] + 1) if places else (0, 0)
    counts = tuple(finite[first:last])
    return schema.Histogram(zero=zero, low=LOWEST + first, counts=counts, over=over)
