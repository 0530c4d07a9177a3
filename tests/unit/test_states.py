"""Damaged states of all tools: refused in one line, with nothing changed, or usable."""

import copy
import re
import warnings
from itertools import islice

import pytest
import torch
from torch import Tensor, nn

from steadygrad.averages import MovingAverage
from steadygrad.balance import LossBalancer
from steadygrad.noise import NoiseScale, SplitBatchNoiseScale
from steadygrad.optim import Eden, ScaledAdam, WarmupHoldDecay
from steadygrad.scale import LayerwiseGradScaler
from tests.golden.trajectories import HERE


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def noise_scale():
    model = network()
    noise = NoiseScale(model, samples=4, decay=0.5)

    def use():
        for _ in range(2):
            (model(torch.randn(4, 3)).square().mean() / 2).backward()
        noise.step()
        model.zero_grad()
        noise.estimate().as_dict()

    return noise, use


def split_batch():
    model, split = network(), SplitBatchNoiseScale(update_rate=0.5)
    return split, lambda: split(model(torch.randn(8, 3))[:, 0].square(), model)


def average():
    mean = MovingAverage(0.5)
    return mean, lambda: mean.update(torch.ones(()))


def balancer():
    found = LossBalancer({"a": 1.0, "b": 4.0})

    def use():
        y = torch.randn(4, 2, requires_grad=True)
        found.backward({"a": y.square().mean(), "b": y.abs().mean()}, y)
        assert y.grad.isfinite().all()

    return found, use


def scaler(scales):
    model = network()
    found = LayerwiseGradScaler(model, scales, init_scale=4.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def use():
        found.scale(model(torch.randn(4, 3)).square().mean()).backward()
        found.step(optimizer)
        found.update()

    return found, use


def schedule(make):
    own = torch.optim.SGD([nn.Parameter(torch.ones(2, 3))])
    found = make(own)
    return found, lambda: (own.step(), found.step())


class Icefalls:
    """A tool that is handed icefall's state in place of its own."""

    def __init__(self, tool, saved, load):
        self.state_dict, self.saved, self.load_state_dict = tool.state_dict, saved, load


def icefall():
    saved = torch.load(HERE / "icefall_checkpoint-zipformer.pt", weights_only=True)
    params = [p.clone().requires_grad_() for p in saved["model"].values()]
    found = ScaledAdam(params, clipping_scale=1.5, clipping_update_period=10)

    def use():
        for p in params:
            p.grad = torch.ones_like(p)
        found.step()
        assert all(p.isfinite().all() for p in params)

    return Icefalls(found, saved["optimizer"], found.load_icefall_state_dict), use


def icefalls_eden():
    found, use = schedule(lambda own: Eden(own, 10, 2))
    return Icefalls(found, {"epoch": 3, "batch": 600}, found.load_state_dict), use


TOOLS = {
    "noise": noise_scale,
    "split": split_batch,
    "average": average,
    "balancer": balancer,
    "scaler": lambda: scaler({"0": 2.0**4}),
    "scaler, auto": lambda: scaler("auto"),
    "warmup": lambda: schedule(lambda own: WarmupHoldDecay(own, 100)),
    "icefall's scaled_adam": icefall,
    "icefall's eden": icefalls_eden,
    "eden": lambda: schedule(lambda own: Eden(own, 10, 2)),
}


def itself():
    nest = {}
    nest["nest"] = [nest]
    return nest


def damages(value):
    """Values in place of one, by name."""
    yield from {
        "none": None,
        "text": "text",
        "negative": -5,
        "nan": torch.nan,
        "infinite": -torch.inf,
        "complex": 1 + 2j,
        "huge": 2**70,
        "true": True,
        "list": [],
        "dict": {},
        "itself": itself(),
        "another shape": torch.ones(7, 7),
        "complex tensor": torch.ones((), dtype=torch.complex64),
    }.items()
    if isinstance(value, Tensor):
        yield "a list of it", value.tolist()
        yield "one less", value[1:] if value.dim() else value[None]
        for dtype in (torch.complex128, torch.bool, torch.int8, torch.float32):
            yield f"as {dtype}", torch.ones_like(value, dtype=dtype)
        for number in (-1, -1e30) if value.is_floating_point() else (-1,):
            if value.dtype is not torch.bool:
                yield f"all {number}", torch.full_like(value, number)
        if value.is_floating_point():
            yield "all nan", torch.full_like(value, torch.nan)
        yield "sparse", torch.ones_like(value, dtype=torch.float32).to_sparse()
        yield "on meta", value.to("meta")


def places(state, at=()):
    """The places of all values in a state."""
    yield at
    nest = state if isinstance(state, (dict, list, tuple)) else ()
    for key, value in (nest if isinstance(nest, dict) else dict(enumerate(nest))).items():
        yield from places(value, (*at, key))


def damaged(state):
    """Copies of a state with one damage each, and what it is."""
    for at in places(state):
        value = state
        for key in at:
            value = value[key]
        for name, other in damages(value):
            yield f"{at}: {name}", replaced(state, at, other)
        if isinstance(value, dict):
            yield (
                f"{at}: one more",
                replaced(state, at, {**value, "step": 3, "more": torch.ones(2)}),
            )
            for key in value:
                less = {k: v for k, v in value.items() if k != key}
                yield f"{at}: without {key}", replaced(state, at, less)


def replaced(state, at, value):
    if not at:
        return value
    if isinstance(state, dict):
        return {**state, at[0]: replaced(state[at[0]], at[1:], value)}
    return type(state)(replaced(v, at[1:], value) if i == at[0] else v for i, v in enumerate(state))


def same(a, b):
    if isinstance(a, Tensor):
        equal = a.dtype == b.dtype and a.shape == b.shape
        return equal and torch.equal(a.nan_to_num(7.5), b.nan_to_num(7.5))
    if isinstance(a, dict):
        return {*a} == {*b} and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and (a == b or a != a)


def judge(make, state, counts):
    """Loads a damaged state into a new tool; says what is wrong with how that goes."""
    tool, use = make()
    use()
    before = copy.deepcopy(tool.state_dict())
    try:
        tool.load_state_dict(state)
    except (ValueError, TypeError, RuntimeError) as error:
        counts["refused"] += 1
        if "\n" in str(error) or not re.search("state|checkpoint|Parameter `", str(error)):
            return f"{type(error).__name__}: {error}"
        return "" if same(before, tool.state_dict()) else f"changed, and {error}"
    except Exception as error:
        return f"raw {type(error).__name__}: {error}"
    counts["taken"] += 1
    try:
        use()
        tool.state_dict()
    except Exception as error:
        return f"taken, then {type(error).__name__}: {error}"
    return ""


def wrongs(name, every=1):
    """What is wrong with how damaged states are loaded, and how many were refused."""
    make, counts, found = TOOLS[name], {"refused": 0, "taken": 0}, []
    tool, use = make()
    use()
    saved = getattr(tool, "saved", None) or copy.deepcopy(tool.state_dict())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for what, state in islice(damaged(saved), 0, None, every):
            wrong = judge(make, state, counts)
            found += [f"{what}: {wrong}"] if wrong else []
    return found, counts


@pytest.mark.parametrize("name", TOOLS)
def test_a_damaged_state_is_refused_or_usable(name):
    found, counts = wrongs(name, every=1 if name == "scaler" else 7)
    assert found == []
    assert counts["refused"] > counts["taken"]
