"""One step of an optimizer as the equations say it, from the optimizer's own state before it.

Each step is judged by itself: the literal reference takes weights and states as the optimizer has
them, in float64, and what the optimizer has afterwards must be the reference's but for roundings.
By induction no weight is wrong after any number of steps.

How much a step's roundings may cost is measured, not chosen: the reference steps again from
weights, gradients and states that differ by a few roundings each. A direction that cancels, or a
norm near its bound, is then allowed what those differences make of it, and nothing else is.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.reference import codes
from tests.reference.lamb import Lamb
from tests.reference.lans import Lans
from tests.reference.scaled_adam import Clipper
from tests.reference.scaled_adam import ScaledAdam as ReferenceScaledAdam

# A parameter's weight and states by name, or a group's shared states.
Numbers = dict[str, Any]
Snapshot = list[list[Numbers]]

# Roundings by which inputs are moved: sums over a tensor and the products before them.
MOVED = 4
# Copies that are moved, and how much more than they show is allowed.
COPIES, MARGIN = 4, 32
# Of an element's largest neighbour; for float64 see `tests.contracts.problems`.
ROUNDINGS = {torch.float32: 64, torch.float64: 1024}
MOMENTS = {"step": "t", "exp_avg": "m", "exp_avg_sq": "v"}
SIZES = {"delta": "delta", "exp_avg_sq": "v", "param_rms": "rms", "scale_exp_avg_sq": "q"}
# Of both terms of a moment, by which a code is allowed to be the neighbour.
CODE_ROUNDINGS = 16 * 2.0**-23
# Of small states that belong to codes, and go through a step as they are.
KEPT = ("codes", "exponents", "floor")
REFERENCES = {LANS: Lans, LAMB: Lamb, ScaledAdam: ReferenceScaledAdam}
# A norm whose square float32 holds with all its digits, also where many elements share it.
LEAST_NORM = 1e-18
# The square of a larger one may be past float32. Clipping then does not remember it, and its factor
# is zero: `tests/unit/optim/test_clipping.py` holds that.
MOST_NORM = 1e19


class Moves(NamedTuple):
    """Random moves, and the side to which a tensor is moved as a whole: both are tried."""

    numbers: np.random.Generator
    side: int


class StepOracle:
    """Judges the next step of an optimizer; made before it, with its gradients and loss scale."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._kind = type(optimizer)
        known = {field.name for field in fields(REFERENCES[self._kind])}
        self._options = [
            {name: value for name, value in group.items() if name in known}
            for group in optimizer.param_groups
        ]
        for options in self._options:
            options["lr"] = float(options["lr"])
        self._before = read(optimizer)
        params = [group["params"] for group in optimizer.param_groups]
        scale = getattr(optimizer, "grad_scale", None)
        scale = 1.0 if scale is None else float(scale)
        self._gradients = [[_gradient(p, self._kind, scale) for p in group] for group in params]
        self._dtypes: list[list[torch.dtype]] = []
        # Parameters with a norm, their group's or a direction's, whose square is no float32 number,
        # in the originals too.
        self.unjudged = 0
        # Codes that were looked at, and those that a rounding of their number may change.
        self.codes = self.near = 0
        self.skips = any(
            g is not None and not np.isfinite(g).all() for group in self._gradients for g in group
        )
        if self._kind is ScaledAdam and not self.skips:
            self.skips = self._sizes_overflow(optimizer)

    def check(self, optimizer: Optimizer) -> None:
        """Compares the optimizer after its step."""
        found = read(optimizer)
        if self.skips:
            for own, state in zip(chain(*found), chain(*self._before), strict=True):
                moved = [name for name in own if not np.array_equal(own[name], state[name])]
                assert moved == [], "moved in a skipped step"
            return
        self._dtypes = [
            [_arithmetic(optimizer, p, group) for p in group["params"]]
            for group in optimizer.param_groups
        ]
        expected = self._step(None)
        for g, group in enumerate(found):
            for i, own in enumerate(group):
                unjudged = expected[g][i].get("unjudged", ())
                self.unjudged += bool(unjudged)
                for name, values in own.items():
                    if name in unjudged or name.endswith(KEPT):
                        continue
                    if f"{name}_codes" in own:
                        self._check_codes(found, expected, g, i, name)
                        continue
                    limits = own.get("narrow") if name == "weight" else None
                    dtype, exact = self._dtypes[g][i], expected[g][i][name]
                    if name == "num_clipped" and expected[g][i].get("at_threshold"):
                        exact = np.clip(values, exact, exact + 1)
                    # A step is added to a weight: its rounding is as large as that of the weight.
                    known = self._before[g][i]["weight"] if name == "weight" else np.zeros(1)
                    if _is_close(values, exact, [], dtype, limits, known):
                        continue
                    others = [copy[g][i][name] for copy in self._copies]
                    assert _is_close(values, exact, others, dtype, limits, known), (
                        f"group {g}, parameter {i}, {name}, {dtype}: off by "
                        f"{np.abs(values - exact).max():.3g} of {np.abs(exact).max():.3g}; moved "
                        f"inputs give {max(np.abs(x - exact).max() for x in others):.3g}"
                    )

    def _check_codes(self, found: Snapshot, expected: Snapshot, g: int, i: int, name: str) -> None:
        """Compares codes with those that the number has by the same random bits."""
        own, before, exact = found[g][i], self._before[g][i], expected[g][i]
        rounded, kept = (own[f"{name}_{what}"] for what in KEPT[:2])
        if self._gradients[g][i] is None:
            for what in KEPT[:2]:
                assert np.array_equal(own[f"{name}_{what}"], before[f"{name}_{what}"])
            return
        # Parameters without elements have no place.
        places = [bool(row["weight"].size) for group in found for row in group]
        place = sum(places[: sum(map(len, found[:g])) + i])
        code = codes.SECOND if name == "exp_avg_sq" else codes.FIRST
        size = np.abs(before[name]) + np.abs(exact[name])
        # Below the least normal numbers roundings are of one size; a zero is exact.
        errors = CODE_ROUNDINGS * size + 2.0**-148 * ((size > 0) & (size < 2.0**-120))
        given = code, place, int(before["step"])
        wrong, near = codes.are_wrong(rounded, kept, exact[name], errors, *given)
        if wrong.any():
            others = [np.abs(x[g][i][name] - exact[name]) for x in self._copies]
            errors += MARGIN * np.max(others, axis=0)
            wrong, near = codes.are_wrong(rounded, kept, exact[name], errors, *given)
        self.codes += wrong.size
        self.near += int(near.sum())
        assert not wrong.any(), (
            f"group {g}, parameter {i}, codes of {name}: {wrong.sum()} of {wrong.size} wrong, "
            f"first {rounded[wrong][0]} for {exact[name][wrong][0]} +- {errors[wrong][0]}"
        )

    def _sizes_overflow(self, optimizer: Optimizer) -> bool:
        """Whether a size cannot be learned: its gradient's square is past the state's type."""
        for group, states, gradients in zip(
            optimizer.param_groups, self._before, self._gradients, strict=True
        ):
            for p, state, g in zip(group["params"], states, gradients, strict=True):
                period = group["size_update_period"]
                is_due = not state["step"] or state["step"] % period == period - 1
                has_size = g is not None and p.numel() > 1
                if has_size and is_due:
                    squares = (state["weight"] * g).sum() ** 2 * 2 * period
                    if squares >= state["most"]:
                        return True
        return False

    @cached_property
    def _copies(self) -> list[Snapshot]:
        """States after steps of moved inputs."""
        return [self._step(Moves(np.random.default_rng(i), 2 * (i % 2) - 1)) for i in range(COPIES)]

    def _step(self, draw: Moves | None) -> Snapshot:
        """The state after the step; of moved inputs if there is a generator."""
        groups = []
        for states, gradients, dtypes in zip(
            self._before, self._gradients, self._dtypes, strict=True
        ):
            own = [_moved(state, dtype, draw) for state, dtype in zip(states, dtypes, strict=True)]
            grads = [
                None if g is None else _moved({"g": g}, dtype, draw)["g"]
                for g, dtype in zip(gradients, dtypes, strict=True)
            ]
            groups.append((own, grads))
        eps = [max([torch.finfo(d).eps for d in ds], default=0.0) for ds in self._dtypes]
        options = [_options(o, e, draw) for o, e in zip(self._options, eps, strict=True)]
        step = _scaled_adam if self._kind is ScaledAdam else _layerwise
        step(REFERENCES[self._kind], groups, options)
        return [own for own, _ in groups]


def read(optimizer: Optimizer) -> Snapshot:
    """All numbers of an optimizer in float64, by group and parameter."""
    found: Snapshot = []
    for group in optimizer.param_groups:
        rows: list[Numbers] = []
        for p in group["params"]:
            state = dict(optimizer.state[p])
            # What the next step does first.
            optimizer._bring_into_form(p, group, state)  # type: ignore[attr-defined]
            row = {
                name: value.detach().double().numpy().copy()
                for name, value in state.items()
                if name not in ("skipped", "master_weight")
            }
            for name in [name for name in row if name.endswith("_exponents")]:
                moment, of = name.removesuffix("_exponents"), codes.FIRST
                row[f"{moment}_codes"], row[name] = row[moment].astype(int), row[name].astype(int)
                if moment == "exp_avg_sq":
                    of, row["floor"] = codes.SECOND, codes.floor(row[name], tuple(p.shape))
                row[moment] = codes.decode(row[f"{moment}_codes"], row[name], of)
            dtype = torch.float32 if "floor" in row else state["exp_avg_sq"].dtype
            row["most"] = np.array(torch.finfo(dtype).max)
            row["weight"] = _exact(p, state.get("master_weight")).double().numpy().copy()
            # What its type can hold of the weight.
            if p.dtype in (torch.float16, torch.bfloat16) and "master_weight" not in state:
                info = torch.finfo(p.dtype)
                row["narrow"] = np.array([info.eps, info.tiny, info.max])
            rows.append(row)
        found.append(rows)
    return found


def everything(optimizer: Optimizer) -> list[Any]:
    """Copies of all options, weights and states, by group; masters as they are stored."""
    found = []
    for group in optimizer.param_groups:
        options = {k: v for k, v in group.items() if k not in ("params", "foreach", "fused")}
        states = [{"weight": p.detach(), **optimizer.state.get(p, {})} for p in group["params"]]
        found.append(copy.deepcopy((options, states)))
    return found


def assert_kept(found: Sequence[Any], known: Sequence[Any]) -> None:
    """Nothing that a load, a copy or a further group must leave alone differs in a bit.

    Both are of :func:`everything`. A load rounds states to the type of a parameter cast since.
    """
    assert len(found) == len(known)
    for (options, states), (known_options, known_states) in zip(found, known, strict=True):
        assert options == known_options
        for state, known_state in zip(states, known_states, strict=True):
            expected = dict(known_state)
            # A cast gives a 16-bit parameter its first master, or ends the need for one.
            if "master_weight" in state:
                expected.setdefault("master_weight", state["weight"])
            elif state["weight"].dtype in (torch.float32, torch.float64):
                expected.pop("master_weight", None)
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                kept = torch.equal(state[name], value.to(state[name].dtype))
                assert kept, f"{name} is another one"


def _exact(p: Tensor, master: Tensor | None) -> Tensor:
    """The weight with its master's digits, but where it was written to since."""
    own = p.detach()
    if master is None or own.dtype not in (torch.float16, torch.bfloat16):
        return own
    # A zero of the other sign was written too.
    same = master.to(own.dtype).view(torch.int16) == own.view(torch.int16)
    return torch.where(same, master, own.to(master.dtype))


def _gradient(p: Tensor, kind: type, loss_scale: float) -> np.ndarray | None:
    if p.grad is not None:
        return p.grad.detach().double().numpy() / loss_scale
    frozen = not p.requires_grad
    return np.zeros(p.shape) if kind is ScaledAdam and not frozen else None


def _arithmetic(optimizer: Optimizer, p: Tensor, group: Mapping[str, Any]) -> torch.dtype:
    """The type that a parameter's step is computed in; a norm of several may be in float32."""
    joint = group.get("clipping_scale") is not None or group.get("max_grad_norm") is not None
    wide = {p.dtype, optimizer.state[p]["exp_avg_sq"].dtype} == {torch.float64}
    return torch.float64 if wide and not joint else torch.float32


def _moved(state: Numbers, dtype: torch.dtype, draw: Moves | None) -> Numbers:
    """Each element by itself, and all of a tensor together, as a rounding of its norm does."""
    eps = MOVED * torch.finfo(dtype).eps
    counts = ("step", "clipping_step", "narrow", "most")
    return {
        name: np.array(value, copy=True)
        if draw is None or name in counts or name.endswith(KEPT)
        else np.asarray(
            value * (1 + eps * (draw.side + draw.numbers.uniform(-1, 1, np.shape(value))))
        )
        for name, value in state.items()
    }


def _options(options: Mapping[str, Any], eps: float, draw: Moves | None) -> Numbers:
    """One less a power of a number near one loses its last digits, in float32 many of them."""
    if draw is None:
        return dict(options)
    betas = tuple(
        beta * (1 + MOVED * eps * draw.numbers.uniform(-1, 1)) for beta in options["betas"]
    )
    return {**options, "betas": betas}


def _layerwise(kind: Any, groups: Sequence[Any], options: Sequence[Numbers]) -> None:
    gradients = [g for _, own in groups for g in own if g is not None]
    total = np.sqrt(sum(float((g**2).sum()) for g in gradients))
    for (states, grads), own in zip(groups, options, strict=True):
        bound = own.pop("max_grad_norm", None)
        scale = 1.0 if bound is None else max(1.0, total / bound)
        scaled = [None if g is None else g / scale for g in grads]
        _by_moments(kind(**own), states, scaled)


def _by_moments(reference: Any, states: Sequence[Numbers], gradients: Sequence[Any]) -> None:
    ratio, norms = reference.ratio, list[float]()

    def noted(x: np.ndarray, u: np.ndarray) -> float:
        norms.extend(map(np.linalg.norm, (x, u)))
        return float(ratio(x, u))

    reference.ratio = noted
    for state, gradient in zip(states, gradients, strict=True):
        norms.clear()
        known = {ours: state[name] for name, ours in MOMENTS.items() if name != "step"}
        known |= {name: state[name] for name in ("floor",) if name in state}
        reference.states[0] = {**known, "t": int(state["step"])}
        reference.step([state["weight"]], [gradient])
        for name, ours in MOMENTS.items():
            state[name] = np.asarray(reference.states[0][ours], dtype=float)
        # Moments do not depend on these norms.
        state["unjudged"] = ["weight"] if any(0 < norm < LEAST_NORM for norm in norms) else []


def _scaled_adam(kind: Any, groups: Sequence[Any], options: Sequence[Numbers]) -> None:
    for (states, gradients), own in zip(groups, options, strict=True):
        reference = kind(**own)
        for place, state in enumerate(states):
            reference.states[place] = _sizes(state)
        clip = _clip(reference, states, gradients)
        for place, (state, g) in enumerate(zip(states, gradients, strict=True)):
            if g is None or not state["weight"].size:
                continue
            reference.t = int(state["step"])
            one = reference.step_scalar if state["weight"].size == 1 else reference.step_tensor
            one(reference.states[place], state["weight"], -g if reference.maximize else g, clip)
            state["step"] = np.asarray(state["step"] + 1)
            known = reference.states[place]
            for name, ours in SIZES.items():
                if name in state:
                    state[name] = np.asarray(known[ours], dtype=float)
            if "scale_grads" in state:
                # The sum of squares must be a number of the state's type; others count as zero.
                ring = np.array(known["ring"])
                state["scale_grads"] = np.where(ring**2 * 2 * ring.size < state["most"], ring, 0.0)


def _sizes(state: Numbers) -> Numbers:
    known = {ours: state[name] for name, ours in SIZES.items() if name in state}
    known |= {name: state[name] for name in ("floor",) if name in state}
    if "scale_grads" in state:
        known["ring"] = [float(x) for x in state["scale_grads"]]
        if state["weight"].size and not state["step"]:
            known["rms"] = np.sqrt((state["weight"] ** 2).mean())
        for name in ("rms", "q"):
            known[name] = float(known[name])
    return known


def _clip(
    reference: ReferenceScaledAdam, states: Sequence[Numbers], gradients: Sequence[Any]
) -> float:
    """The factor of a group, whose clipping counts its own steps."""
    # Nobody works on a group that is frozen, or whose parameters have no elements.
    pairs = zip(states, gradients, strict=True)
    if reference.clipping_scale is None or all(g is None or not s["weight"].size for s, g in pairs):
        return 1.0
    first, taken = states[0], int(states[0]["clipping_step"])
    ring, threshold = first["model_norms"], first["model_norm_threshold"]
    reference.clipper = Clipper(
        reference.clipping_scale, len(ring), reference.recipe,
        {i: float(norm) for i, norm in enumerate(ring)}, float(threshold), taken,
    )  # fmt: skip
    # Sizes as they were last measured: none of a parameter that takes its first step.
    sizes, reference.states = reference.states, {
        place: {"rms": float(state.get("param_rms", 0.0))} for place, state in enumerate(states)
    }  # fmt: skip
    weights = [state["weight"] for state in states]
    given = [np.zeros(1) if g is None else g for g in gradients]
    factor, reference.states = reference.clip(weights, given), sizes
    norms = np.array([reference.clipper.norms[i] for i in range(len(ring))])
    early = [n for n in (10, 20, 40) if n < len(ring) and reference.recipe == "zipformer"]
    is_due = taken % len(ring) == 0 or taken in early
    before = 0.0 if is_due else float(first["num_clipped"])
    # A threshold may be this very norm: then roundings decide whether the step is clipped.
    norm = norms[taken % len(ring)]
    ratio = reference.clipper.threshold / (norm + 1e-20)
    at_threshold = taken > 0 and abs(ratio - 1) < 64 * torch.finfo(torch.float32).eps
    is_usual = norm == 0 or LEAST_NORM <= norm <= MOST_NORM
    for state in states:
        state["at_threshold"] = at_threshold
        state["unjudged"] = [] if is_usual else [*state]
        state["clipping_step"] = np.asarray(taken + 1)
        state["model_norms"] = norms
        state["model_norm_threshold"] = np.asarray(reference.clipper.threshold)
        state["num_clipped"] = np.asarray(before + (factor < 1 and not at_threshold))
    return factor


def _is_close(
    found: np.ndarray, expected: np.ndarray, moved: Sequence[np.ndarray], dtype: torch.dtype,
    limits: np.ndarray | None, known: np.ndarray,
) -> bool:  # fmt: skip
    """Whether two arrays are equal but for roundings, and for what moved inputs change."""
    if limits is not None:
        # Larger numbers are infinite in this type; at the limit roundings decide.
        held = np.abs(expected) < limits[2] * (1 - limits[0])
        found, expected = found[held], expected[held]
        moved = [copy[held] for copy in moved]
    finite = np.isfinite(expected)
    if not np.array_equal(np.isfinite(found), finite):
        return False
    if not finite.any():
        return True
    scale = max(float(np.abs(expected[finite]).max()), float(np.abs(known).max(initial=0.0)))
    spread = max((float(np.abs((copy - expected)[finite]).max()) for copy in moved), default=0.0)
    allowed = ROUNDINGS[dtype] * torch.finfo(dtype).eps * scale + MARGIN * spread
    # Numbers below the type's least normal one are rounded to its multiples, or to zero.
    allowed += torch.finfo(dtype).tiny
    if limits is not None:
        allowed += limits[0] * max(scale, limits[1])
    return float(np.abs((found - expected)[finite]).max()) <= allowed
