"""A random life of an optimizer, each step of which is judged by the equations."""

import copy
from collections import Counter
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import reloaded, small_codes
from tests.property.oracle import StepOracle, assert_kept, everything

__all__ = ["MODES", "OPTIMIZERS", "STATES", "OptimizerMachine"]

MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}, "single": {"foreach": False}}
OPTIMIZERS = {"lans": LANS, "lamb": LAMB, "scaled_adam": ScaledAdam}
STATES = ("float32", "8bit")
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SMALL = [(), (1,), (4,), (0, 3), (3, 5), (2, 3, 4), (1, 7), (33,), (40, 30), (5000,)]
# With rows of more than a block of codes, and of whole ones.
ROWS = [(40, 30), (3, 300), (2, 512), (5, 3, 100)]
# Of several chunks, and worth several threads; seldom, because its steps take longer.
LARGE = (300, 256)
# Of a weight: squares of many are float32 numbers.
LARGEST = 1e15
# Of the norms that clipping looks back at, and with which all early thresholds are in force.
PERIODS = [1, 2, 3, 7, 11, 12, 50, 50]

_betas = st.sampled_from([0.0, 0.5, 0.9, 0.98, 0.999])
_bounds = st.sampled_from([(None, None), (0.1, None), (None, 2.0), (0.1, 2.0)])
_scales = st.sampled_from([1.0, 1.0, 1.0, 0.0, 1e-8, 1e-3, 1e3, 1e8])


@st.composite
def layerwise_options(draw: Any, kind: type) -> dict[str, Any]:
    """Options of LANS and LAMB."""
    low, high = draw(_bounds)
    own = {"clip_value": draw(st.sampled_from([None, 0.3]))}
    if kind is LAMB:
        # One norm over all groups: those that bound it divide by their own.
        own = {
            "max_grad_norm": draw(st.sampled_from([None, 1.0])),
            "adapt": draw(st.booleans()),
        }
    return {
        "lr": draw(st.sampled_from([0.0, 1e-4, 1e-2])),
        "betas": (draw(_betas), draw(_betas)),
        "eps": draw(st.sampled_from([1e-6, 1e-3])),
        "weight_decay": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "lower_bound": low,
        "upper_bound": high,
        "maximize": draw(st.booleans()),
        **own,
    }


@st.composite
def scaled_adam_options(draw: Any) -> dict[str, Any]:
    """Options of ScaledAdam."""
    return {
        "lr": draw(st.sampled_from([0.0, 1e-3, 3e-2, 0.5])),
        "betas": (draw(_betas), draw(_betas)),
        "eps": draw(st.sampled_from([1e-8, 1e-4])),
        "scalar_lr_scale": draw(st.sampled_from([0.1, 1.0])),
        "param_min_rms": draw(st.sampled_from([1e-5, 0.2])),
        "param_max_rms": draw(st.sampled_from([3.0, 0.25])),
        "scalar_max": draw(st.sampled_from([10.0, 0.2])),
        "size_update_period": draw(st.integers(1, 5)),
        "clipping_scale": draw(st.sampled_from([None, None, 0.5, 2.0])),
        "clipping_update_period": draw(st.sampled_from(PERIODS)),
        "recipe": draw(st.sampled_from(["zipformer", "stateless7"])),
        "maximize": draw(st.booleans()),
    }


def options_of(kind: type) -> Any:
    return scaled_adam_options() if kind is ScaledAdam else layerwise_options(kind)


class OptimizerMachine(RuleBasedStateMachine):
    """Steps, skips, groups, options, casts, layouts, freezes, loads, copies, threads, loss scales.

    A subclass names the optimizer and the mode that it begins with, whether some groups keep their
    moments in eight bits, where events are counted, and a factor on the numbers of steps.
    """

    kind: type[Optimizer]
    mode: str
    states: str
    counts: Counter[str]
    stretch: int

    def __init__(self) -> None:
        super().__init__()
        self.threads, self.patched = torch.get_num_threads(), small_codes()
        # Small parameters make for many steps.
        self.patched.__enter__()

    def teardown(self) -> None:
        torch.set_num_threads(self.threads)
        self.patched.__exit__(None, None, None)

    @initialize(data=st.data(), seed=st.integers(0, 2**32 - 1), masters=st.booleans())
    def make(self, data: Any, seed: int, masters: bool) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        # Numbers that float16 holds without masters would be rounded away.
        self.masters = None if masters or self.kind is ScaledAdam else False
        groups = [self._group(data) for _ in range(data.draw(st.integers(1, 2)))]
        if data.draw(st.integers(0, 9)) == 9:
            groups[0]["params"].append(nn.Parameter(self._numbers(LARGE, data)))
            torch.set_num_threads(2)
        self.optimizer = self.kind(groups, **MODES[self.mode])  # type: ignore[call-arg]
        self.skipped, self.exponent = 0, 0

    def _group(self, data: Any) -> dict[str, Any]:
        known = SMALL + ROWS * (self.states == "8bit")
        shapes = data.draw(st.lists(st.sampled_from(known), min_size=1, max_size=5))
        params = [nn.Parameter(self._numbers(shape, data)) for shape in shapes]
        options = data.draw(options_of(self.kind)) | {"master_weights": self.masters}
        options["state_dtype"] = self._state_dtype(data)
        if data.draw(st.booleans()):
            options["lr"] = torch.tensor(options["lr"])
        return {"params": params, **options}

    def _state_dtype(self, data: Any) -> str:
        is_coded = self.states == "8bit" and data.draw(st.integers(0, 3)) > 0
        return "8bit" if is_coded else "float32"

    def _numbers(self, shape: tuple[int, ...], data: Any) -> Tensor:
        values = torch.randn(shape, generator=self.draw) * 0.3 + 0.1
        dtype = data.draw(st.sampled_from(DTYPES))
        return (values * data.draw(st.sampled_from([1.0, 1.0, 0.0, 10.0]))).to(dtype)

    @property
    def params(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def take_steps(self, data: Any, steps: int) -> None:
        """Some steps; each parameter keeps the scale of its gradients."""
        scales = [data.draw(_scales) for _ in self.params]
        missing = data.draw(st.integers(0, 7))
        strided = data.draw(st.booleans())
        # Gradients of many sizes within a block, which grow: where codes need their bounds.
        uneven = self.states == "8bit" and data.draw(st.booleans())
        for step in range(steps * self.stretch):
            self._give_gradients(scales, missing, strided)
            for p in self.params if uneven else ():
                if p.grad is not None:
                    sizes = 10 ** (-9 * torch.rand(p.shape, generator=self.draw).square())
                    p.grad *= sizes * 1.1 ** (step % 60)
            self._step()

    # Rules are drawn alike, and steps are what is judged.
    step = rule(data=st.data(), steps=st.integers(1, 20))(take_steps)
    step_on = rule(data=st.data(), steps=st.sampled_from([*range(1, 21)] * 2 + [60]))(take_steps)

    @rule(place=st.integers(0, 99), value=st.sampled_from([torch.inf, -torch.inf, torch.nan]))
    def skip(self, place: int, value: float) -> None:
        """One element of one gradient is not finite."""
        self._give_gradients([1.0] * len(self.params), 99, False)
        some = [p.grad for p in self.params if p.grad is not None and p.numel()]
        if some:
            some[place % len(some)].view(-1)[place % some[place % len(some)].numel()] = value
        self._step()

    def _give_gradients(self, scales: list[float], missing: int, strided: bool) -> None:
        for i, (p, scale) in enumerate(zip(self.params, scales, strict=True)):
            if i == missing or not p.requires_grad:
                p.grad = None
                continue
            values = torch.randn(p.shape, generator=self.draw) * scale * self._loss_scale()
            values = values.to(p.dtype)
            if strided and p.ndim == 2:
                values = values.t().contiguous().t()
            p.grad = values

    def _loss_scale(self) -> float:
        has_float16 = any(p.dtype is torch.float16 for p in self.params)
        return 2.0 ** min(self.exponent, 10 if has_float16 else 80)

    def _step(self) -> None:
        scale = torch.tensor(self._loss_scale()) if self.exponent else None
        self.optimizer.grad_scale, self.optimizer.found_inf = scale, None  # type: ignore[attr-defined]
        oracle = StepOracle(self.optimizer)
        self.optimizer.step()
        oracle.check(self.optimizer)
        self.skipped += oracle.skips
        self.counts["steps"] += 1
        self.counts["skipped steps"] += oracle.skips
        self.counts["codes"] += oracle.codes
        self.counts["codes that a rounding may change"] += oracle.near
        self.counts["parameters not judged, for norms out of float32's range"] += oracle.unjudged
        if torch.get_num_threads() > 1 and any(p.shape == LARGE for p in self.params):
            self.counts["steps that several threads may share"] += 1
        assert int(self.optimizer.skipped) == self.skipped  # type: ignore[attr-defined]
        for p in () if oracle.skips else self.params:
            master = self.optimizer.state[p].get("master_weight")
            assert p.grad is None or master is None or torch.equal(p, master.to(p.dtype))
        self._mend_overflows()

    def _mend_overflows(self) -> None:
        """Weights may leave their type, or their squares float32; no equation holds after that."""
        for p in self.params:
            if not (p.abs() < LARGEST).all():
                p.data.nan_to_num_(0.0).clamp_(-1, 1)
                self.counts["overflowed weights"] += 1

    @rule(exponent=st.sampled_from([0, 10, 80]))
    def set_loss_scale(self, exponent: int) -> None:
        """As a gradient scaler hands it over; the square of the largest is past float32."""
        self.exponent = exponent
        self.counts["loss scales"] += 1

    @rule(data=st.data())
    def edit_options(self, data: Any) -> None:
        group = data.draw(st.sampled_from(self.optimizer.param_groups))
        fixed = ("size_update_period", "clipping_update_period", "recipe")
        options = data.draw(options_of(self.kind))
        options["state_dtype"] = self._state_dtype(data)
        group.update({k: v for k, v in options.items() if k not in fixed})
        self.counts["edited options"] += 1

    @precondition(lambda self: len(self.optimizer.param_groups) < 4)
    @rule(data=st.data())
    def add_group(self, data: Any) -> None:
        self.optimizer.state_dict()  # brings states into the form that options now ask for
        known = everything(self.optimizer)
        self.optimizer.add_param_group(self._group(data))
        assert_kept(everything(self.optimizer)[: len(known)], known)
        self.counts["added groups"] += 1

    @rule(place=st.integers(0, 99))
    def freeze_or_thaw(self, place: int) -> None:
        p = self.params[place % len(self.params)]
        p.requires_grad_(not p.requires_grad)
        self.counts["freezes"] += 1

    @rule(data=st.data(), one=st.booleans(), place=st.integers(0, 99))
    def cast(self, data: Any, one: bool, place: int) -> None:
        """The model, or one parameter, is cast after a step."""
        dtype = data.draw(st.sampled_from(DTYPES))
        for p in [self.params[place % len(self.params)]] if one else self.params:
            p.grad = None
            p.data = p.data.to(dtype)
        self.counts["casts"] += 1

    @rule(place=st.integers(0, 99))
    def change_layout(self, place: int) -> None:
        p = self.params[place % len(self.params)]
        if p.ndim == 2:
            p.grad = None
            p.data = p.data.t().contiguous().t()
            self.counts["changed layouts"] += 1

    @rule(place=st.integers(0, 99), factor=st.sampled_from([0.0, 0.5, -1.0, 2.0]))
    def write_weights(self, place: int, factor: float) -> None:
        with torch.no_grad():
            self.params[place % len(self.params)].mul_(factor)
        self.counts["written weights"] += 1

    @rule(mode=st.sampled_from([*MODES]))
    def load(self, mode: str) -> None:
        """A file, read into another optimizer of another mode, which goes on."""
        groups = [
            {**group, **dict.fromkeys(("foreach", "fused")), **MODES[mode]}
            for group in self.optimizer.param_groups
        ]
        other = self.kind(groups)
        other.load_state_dict(reloaded(self.optimizer.state_dict()))
        assert_kept(everything(other), everything(self.optimizer))
        for group in other.param_groups:
            group.update({**dict.fromkeys(("foreach", "fused")), **MODES[mode]})
        self.optimizer = other
        self.counts["loads"] += 1

    @rule()
    def deepcopy(self) -> None:
        known = everything(self.optimizer)
        self.optimizer = copy.deepcopy(self.optimizer)
        assert_kept(everything(self.optimizer), known)
        self.counts["copies"] += 1

    @rule(threads=st.integers(1, 4))
    def set_threads(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.counts["thread counts"] += 1
