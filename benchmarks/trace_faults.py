"""How often ``steadygrad diff`` finds a fault in a random net, and sees one where none is.

    python benchmarks/trace_faults.py --faults 10000 --first 0 --nets 1000 --python PATH --save

A net, its data, its optimizer and a fault are drawn by a seed; it trains a few steps without the
fault, A, and with it, B. A fault changes one place: a step, a stage and a module. The verdict is
right if it names all three; of a gradient within the backward pass, if it names the value that was
changed, or the module that gave it. A loss is seen itself or at the net's output. A rate has no
module: any that it moved is right.

A fault is defined if it moves the value that it changes by more than ``diff.ROUNDINGS`` roundings
of its type, relative to its norm, measured on the tensor itself in float64; and, if it is one of
the random state, the forward pass, the loss, the backward pass or a gradient, if a gradient that
the optimizer gets changes by more than rounding in the type of the pass (``diff.rounding_of``):
clipping takes a factor away, and under autocast gradients are computed in bfloat16. Others are
counted apart.

The same nets without a fault are computed otherwise in B: any verdict but "same" is a false alarm.
"""

import argparse
import io
import math
import multiprocessing
import os
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.side_by_side import hardware, save

from steadygrad.optim import LANS, ScaledAdam
from steadygrad.trace import Trace, diff, words
from steadygrad.trace.runs import read_run

SMALLEST, LARGEST = 1e-4, 1.0
# A gradient of fewer roundings of all can be rounding alone, as that of a bias of keys.
OWN = 10.0
ROWS, CLASSES = 64, 7
ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "relu in place": partial(nn.ReLU, inplace=True),
    "gelu": nn.GELU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, 3e-3, weight_decay=0.05),
    "Adam": lambda p: torch.optim.Adam(p, 3e-3),
    "SGD": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=1e-3),
    "LANS": lambda p: LANS(p, 1e-2),
    "ScaledAdam": lambda p: ScaledAdam(p, 3e-2),
}


class Attention(nn.Module):
    """Causal attention of one head, with or without a bias of its keys."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.q, self.v, self.out = (nn.Linear(width, width) for _ in range(3))
        self.k = nn.Linear(width, width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            functional.scaled_dot_product_attention(
                self.q(x)[:, None], self.k(x)[:, None], self.v(x)[:, None], is_causal=True
            )[:, 0]
        )


class Residual(nn.Module):
    """Adds what its part makes, with a norm before it or after the sum."""

    def __init__(self, part: nn.Module, norm: nn.Module, drop: float, before: bool) -> None:
        super().__init__()
        self.norm, self.part, self.drop, self.before = norm, part, nn.Dropout(drop), before

    def forward(self, x: Tensor) -> Tensor:
        if self.before:
            return x + self.drop(self.part(self.norm(x)))
        return self.norm(x + self.drop(self.part(x)))


class Mixture(nn.Module):
    """Each row goes to two experts."""

    def __init__(self, width: int, experts: list[nn.Module]) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(width, len(experts)), nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        chance, chosen = self.router(flat).softmax(-1).topk(2, -1)
        total = torch.zeros_like(flat, dtype=torch.promote_types(flat.dtype, chance.dtype))
        for i, expert in enumerate(self.experts):
            row, place = (chosen == i).nonzero(as_tuple=True)
            if len(row):
                own = expert(flat[row]) * chance[row, place, None]
                total = total.index_add(0, row, own.to(total.dtype))
        return total.view_as(x)


class Recurrent(nn.Module):
    """Layers of which the output goes on and the state does not."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[0]


class Head(nn.Module):
    """Means over the places of an image."""

    def __init__(self, width: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.out = norm, nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x.mean((2, 3)) if x.ndim == 4 else x))


class Net(nn.Module):
    """An entry, blocks and a head."""

    def __init__(self, entry: nn.Module, blocks: Iterable[nn.Module], head: nn.Module) -> None:
        super().__init__()
        self.entry, self.blocks, self.head = entry, nn.ModuleList(blocks), head

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Whole(nn.Module):
    """A net that returns its loss."""

    def __init__(self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(self.net(x), y)


class Task:
    """A net, its data, its optimizer and its loop, by a seed.

    Args:
        seed: What all is drawn by.
        scale: Factor on width and batch, so that several threads have work.
    """

    def __init__(self, seed: int, scale: int = 1) -> None:
        self.seed, self._draw = seed, random.Random(seed)
        draw = self._draw
        self.family = draw.choice(
            ["layers", "images", "recurrent", "transformer", "residual", "mixture"]
        )
        self.width, self.depth = scale * draw.choice([8, 12, 16, 24]), draw.randint(1, 3)
        if self.family in ("transformer", "mixture"):
            self.depth = min(self.depth, 2)
        self.batch, self.micros = scale * draw.choice([4, 6, 8, 12]), draw.choice([1, 1, 2])
        self.length, self.steps = draw.randint(3, 9), draw.randint(3, 5)
        self.activation = draw.choice([*ACTIVATIONS])
        self.norm = draw.choice(["batch", "layer", "rms", "none"])
        self.drop = draw.choice([0.0, 0.1])
        # The last ones have most states, which take most time.
        self.optimizer = draw.choices([*OPTIMIZERS], [3, 2, 2, 1, 1])[0]
        self.clip = draw.choice([0.0, 0.5, 10.0])
        kind = draw.random()
        self.cast = kind < 0.15
        self.dtype = torch.float64 if kind > 0.85 else torch.float32
        self.regression, self.whole = draw.random() < 0.2, draw.random() < 0.15
        self.tells, self.bias, self.before = (draw.random() < p for p in (0.7, 0.5, 0.7))
        self.words = self.family in ("recurrent", "transformer") or (
            self.family in ("residual", "mixture") and draw.random() < 0.5
        )
        if self.family == "images" and self.norm != "none":
            self.norm = "batch" if self.norm != "layer" else "group"
        elif self.words and self.norm == "batch":
            self.norm = "layer"
        # A CPU's LSTM has no bfloat16.
        self.cast = self.cast and self.family != "recurrent"
        g = torch.Generator().manual_seed(seed)
        if self.words:
            self._x = torch.randint(30, (scale * ROWS, self.length), generator=g)
        else:
            shape = (2, 8, 8) if self.family == "images" else (10,)
            self._x = torch.randn(scale * ROWS, *shape, generator=g, dtype=self.dtype)
        where = self._x.shape if self.words else self._x.shape[:1]
        self._y = torch.randint(CLASSES, where, generator=g)
        if self.regression:
            self._y = torch.randn(*where, CLASSES, generator=g, dtype=self.dtype)

    @property
    def text(self) -> str:
        kind = "bfloat16 autocast" if self.cast else str(self.dtype)[6:]
        names = [self.family, kind, self.optimizer, f"{self.activation}, norm {self.norm}"]
        names += [f"drop {self.drop}", f"{self.micros} micro-batches", f"clip {self.clip}"]
        return ", ".join(names + ["returns its loss"] * self.whole + ["no loss"] * (not self.tells))

    @property
    def eps(self) -> float:
        """Of the type in which most is computed."""
        return torch.finfo(torch.bfloat16 if self.cast else self.dtype).eps

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.seed)
        # Processors draw the same numbers but for the last digits of their type.
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        net: nn.Module = Net(self._entry(), map(self._block, range(self.depth)), self._head())
        torch.set_default_dtype(before)
        model = Whole(net, self.loss) if self.whole else net
        return model, OPTIMIZERS[self.optimizer](model.parameters())

    def rows(self, step: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        at = (step * self.batch + shift + torch.arange(self.batch)) % len(self._x)
        return self._x[at], self._y[at]

    def loss(self, outputs: Tensor, targets: Tensor, smoothing: float = 0.0) -> Tensor:
        if self.regression:
            return functional.mse_loss(outputs, targets)
        outputs, targets = outputs.reshape(-1, CLASSES), targets.reshape(-1)
        return functional.cross_entropy(outputs, targets, label_smoothing=smoothing)

    def _entry(self) -> nn.Module:
        if self.words:
            return nn.Embedding(30, self.width)
        if self.family == "images":
            return nn.Conv2d(2, self.width, 3, padding=1)
        return nn.Linear(10, self.width)

    def _norm(self, width: int) -> nn.Module:
        kinds: dict[str, Callable[[], nn.Module]] = {
            "batch": lambda: (nn.BatchNorm2d if self.family == "images" else nn.BatchNorm1d)(width),
            "group": lambda: nn.GroupNorm(2, width),
            "layer": lambda: nn.LayerNorm(width),
            "rms": lambda: nn.RMSNorm(width),
            "none": nn.Identity,
        }
        return kinds[self.norm]()

    def _layers(self) -> nn.Module:
        wide, act = 2 * self.width, ACTIVATIONS[self.activation]
        return nn.Sequential(nn.Linear(self.width, wide), act(), nn.Linear(wide, self.width))

    def _block(self, number: int) -> nn.Module:
        width, act = self.width, ACTIVATIONS[self.activation]
        if self.family == "images":
            parts = nn.Conv2d(width, width, 3, padding=1), self._norm(width), act()
            block = nn.Sequential(*parts, nn.Dropout(self.drop))
            return block if number else nn.Sequential(*block, nn.MaxPool2d(2))
        if self.family == "recurrent":
            kind = (nn.GRU, nn.LSTM)[self.bias]
            return Recurrent(kind(width, width, 1 + self.before, dropout=self.drop * self.before,
                                  batch_first=True))  # fmt: skip
        if self.family == "layers":
            drop = nn.Dropout(self.drop)
            return nn.Sequential(nn.Linear(width, width), self._norm(width), act(), drop)
        part = self._layers()
        if self.family == "mixture":
            part = Mixture(width, [self._layers() for _ in range(3)])
        block = Residual(part, self._norm(width), self.drop, self.before)
        if self.family != "transformer":
            return block
        attention = Attention(width, self.bias)
        return nn.Sequential(Residual(attention, self._norm(width), self.drop, self.before), block)

    def _head(self) -> nn.Module:
        words = self.words or self.family == "images"
        return Head(self.width, nn.Identity() if words else self._norm(self.width))


class Moved:
    """How far a value is moved, over all its parts, relative to its norm."""

    def __init__(self) -> None:
        self._change = self._size = 0.0
        self.eps = 0.0

    def add(self, before: Tensor, after: Tensor) -> None:
        self.change(before, after)
        self.of(before)

    def of(self, value: Tensor) -> None:
        self._size += value.detach().double().square().sum().item()
        # Whole numbers are not rounded.
        self.eps = torch.finfo(value.dtype).eps if value.is_floating_point() else 0.0

    def change(self, before: Tensor, after: Tensor) -> None:
        one, other = before.detach().double(), after.detach().double()
        change = (other - one).square().sum().item()
        self._change += change if math.isfinite(change) else math.inf

    @property
    def share(self) -> float:
        if not self._size or math.isinf(self._change):
            return math.inf if self._change else 0.0
        return math.sqrt(self._change / self._size)

    @property
    def defined(self) -> bool:
        return self.share > diff.ROUNDINGS * self.eps


class Order:
    """What gives which tensor and takes it, in the first pass of a model, and what draws."""

    def __init__(self, model: nn.Module, run: Callable[[], Any]) -> None:
        self.gives, self.takes = dict[str, set[Any]](), dict[str, set[Any]]()
        self.drew: str | None = None
        self._kept, self._state = list[Any](), torch.get_rng_state()
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._before, name))
            module.register_forward_hook(partial(self._after, name))
        run()

    def same(self, name: str) -> set[str]:
        """Modules that give the same tensor."""
        own = self.gives.get(name, set())
        return {other for other, given in self.gives.items() if given & own} | {name}

    def before(self, name: str) -> set[str]:
        """Modules that give or take what this one takes."""
        own = self.takes.get(name, set())
        both = (*self.gives.items(), *self.takes.items())
        return {other for other, values in both if values & own}

    def _before(self, name: str, _: nn.Module, args: Any) -> None:
        self._note(self.takes.setdefault(name, set()), args)

    def _after(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self._note(self.gives.setdefault(name, set()), output)
        state, before = torch.get_rng_state(), self._state
        if self.drew is None and not torch.equal(state, before):
            self.drew = name
        self._state = state

    def _note(self, values: set[Any], nest: Any) -> None:
        for x in (nest,) if isinstance(nest, Tensor) else nest:
            if isinstance(x, Tensor):
                self._kept.append(x)
                values.add((id(x), x._version))


class Fault:
    """Nothing is wrong: what other faults change.

    Attributes:
        stages: Right answers.
        modules: Right answers.
        named: Modules whose value is a right answer.
        moved: How far each value was moved that it changed.
        reaches: Whether it counts only if it changes a bit of the gradients.
    """

    stages: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ("nothing",)
    reaches = False

    def __init__(self, task: Task, draw: random.Random) -> None:
        self.task, self.draw, self.step = task, draw, draw.randrange(task.steps)
        self.kind, self.name = draw.choice(self.kinds_of(task)), ""
        self.size = math.exp(draw.uniform(math.log(SMALLEST), math.log(LARGEST)))
        self.factor = 1 + self.size * draw.choice([-1, 1])
        self.modules = set[str]()
        self.named, self.moved = set[str](), [Moved()]

    def kinds_of(self, task: Task) -> tuple[str, ...]:
        return self.kinds

    def install(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: Order) -> None:
        self.model, self.optimizer, self.order = model, optimizer, order
        self.on = False

    def on_begin(self) -> None:
        pass

    def on_data(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    def on_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(outputs, targets)

    def on_gradients(self) -> None:
        pass

    def on_end(self) -> None:
        pass

    def judge(self, a: "Evidence", b: "Evidence") -> None:
        """What is right, where that is known from both runs only."""

    def changed(self, x: Tensor) -> Tensor:
        """Another value in place of one."""
        size, root, draw = self.size, x.detach().square().mean().sqrt(), self.draw
        if self.kind == "scaled":
            return x * self.factor
        if self.kind == "shifted":
            return x + size * root
        if self.kind == "noise":
            g = torch.Generator().manual_seed(draw.randrange(2**31))
            return x + size * root * torch.randn(x.shape, generator=g).to(x.dtype)
        if self.kind == "clipped":
            most = x.detach().abs().max() * (1 - min(size, 0.9))
            return x.clamp(-most, most)
        part = torch.ones_like(x)
        if self.kind == "row":
            part[draw.randrange(len(x))] = self.factor
        elif self.kind == "channel":
            side = 1 if x.ndim == 4 else x.ndim - 1
            part.select(side, draw.randrange(x.shape[side])).zero_()
        return x * part

    def parameter(self) -> tuple[str, nn.Parameter]:
        name, p = self.draw.choice([*self.model.named_parameters()])
        self.name, self.modules = name, {owner(name)}
        return name, p

    def module(self) -> tuple[str, nn.Module]:
        found = [m for m in self.model.named_modules() if not isinstance(m[1], nn.ModuleList)]
        name, module = self.draw.choice(found[1:] if self.task.whole else found)
        self.name, self.modules = name, {name}
        if inner := self.order.same(name) - {name}:
            self.name = f"{name} (which gives the same tensor as {max(sorted(inner), key=len)})"
        return name, module


class Data(Fault):
    """Other rows: one sample, or all one row later."""

    stages, kinds = ("data",), ("sample", "rows")

    def on_data(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        self.modules = {""}
        others = self.task.rows(self.step, 1 if self.kind == "rows" else self.task.batch)
        if self.kind == "sample":
            row, own = self.draw.randrange(len(x)), (x.clone(), y.clone())
            for tensor, other in zip(own, others, strict=True):
                tensor[row] = other[row]
            others = own
        self.moved[0].add(x, others[0])
        return others


class Random(Fault):
    """Another seed, before a step."""

    stages, kinds, reaches = ("random state",), ("seed",), True

    def on_begin(self) -> None:
        self.modules = {str(self.order.drew)}
        torch.manual_seed(self.task.seed + 10**6)
        # Any other numbers are another state.
        self.moved[0].add(torch.zeros(1), torch.ones(1))


class Start(Fault):
    """A weight is another one before a step."""

    stages, kinds = ("weights at the start",), ("scaled", "row", "noise", "channel", "drawn")

    def on_begin(self) -> None:
        _, p = self.parameter()
        before = p.detach().clone()
        if self.kind == "drawn":
            row = torch.randn(before[:1].shape, generator=torch.Generator().manual_seed(1))
            new = before.clone()
            new[:1] = self.size * row.to(p.dtype)
        else:
            new = self.changed(before)
        p.data.copy_(new)
        self.moved[0].add(before, p)


class Forward(Fault):
    """The output of a module is another one."""

    stages, reaches = ("forward pass",), True
    kinds = ("scaled", "shifted", "channel", "row", "noise")

    def install(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: Order) -> None:
        super().install(model, optimizer, order)
        self.module()[1].register_forward_hook(self._hook)

    def _hook(self, _: nn.Module, __: Any, output: Any) -> Any:
        if not self.on:
            return None
        first = output if isinstance(output, Tensor) else output[0]
        new = self.changed(first)
        self.moved[0].add(first, new)
        return new if isinstance(output, Tensor) else (new, *output[1:])


class Loss(Fault):
    """Another loss of the same outputs."""

    stages, reaches = ("loss",), True

    def kinds_of(self, task: Task) -> tuple[str, ...]:
        smoothed = () if task.regression else ("smoothing",)
        # A model that returns its loss is given the targets.
        return ("divisor", *smoothed, *(() if task.whole else ("targets", "gradient alone")))

    def install(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: Order) -> None:
        super().install(model, optimizer, order)
        # A loss has no module: it is seen itself, or at what it is computed from.
        self.named = {"", *order.same("net" if self.task.whole else "")}
        self.moved = [Moved(), Moved()]
        if isinstance(model, Whole):
            model.loss = self.on_loss

    def on_loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if not self.on:
            return self.task.loss(outputs, targets)
        own = outputs.detach().requires_grad_()
        losses = self.task.loss(own, targets), self._wrong(own, targets)
        signals = [torch.autograd.grad(x, own)[0] for x in losses]
        if self.task.tells or self.task.whole:
            self.moved[0].add(*losses)
        self.moved[1].add(*signals)
        return self._wrong(outputs, targets)

    def _wrong(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.kind == "targets":
            return self.task.loss(outputs, targets.roll(1, 0))
        if self.kind == "smoothing":
            return self.task.loss(outputs, targets, self.size / 2)
        loss = self.task.loss(outputs, targets)
        if self.kind == "divisor":
            return loss * self.factor
        return loss.detach() + self.factor * (loss - loss.detach())


class Backward(Fault):
    """A gradient at the output of a module, or one that it gives back, is another one."""

    stages, reaches = ("backward pass",), True
    kinds = ("scaled", "shifted", "channel", "row", "noise")

    def install(self, model: nn.Module, optimizer: torch.optim.Optimizer, order: Order) -> None:
        super().install(model, optimizer, order)
        ways = ["output", "output, as a module", "input, as a module"]
        # Torch's hooks of modules do not allow changes in place.
        self.way = self.draw.choice(ways[: 1 if "place" in self.task.activation else 3])
        name, module = self.module()
        self.name += f", hook at its {self.way}"
        if self.way == "output":
            module.register_forward_hook(self._on_output)
        elif self.way == "output, as a module":
            module.register_full_backward_pre_hook(self._on_outputs)
        else:
            module.register_forward_pre_hook(self._on_input)
            module.register_full_backward_hook(self._on_inputs)
        near = (
            self.order.before(name) if self.way == "input, as a module" else self.order.same(name)
        )
        self.named = near | {name}
        if self.way != "input, as a module" and "" in near:
            # What gives the gradient at the model's output is the loss.
            self.stages = (*self.stages, "loss")

    def _signal(self, gradient: Tensor) -> Tensor:
        new = self.changed(gradient)
        self.moved[0].add(gradient, new)
        return new

    def _on_output(self, _: nn.Module, __: Any, output: Any) -> None:
        first = output if isinstance(output, Tensor) else output[0]
        if self.on and first.requires_grad:
            first.register_hook(self._signal)

    def _on_outputs(self, _: nn.Module, signals: tuple[Tensor | None, ...]) -> Any:
        if not self.on or signals[0] is None:
            return None
        return self._signal(signals[0]), *signals[1:]

    def _on_input(self, _: nn.Module, args: tuple[Tensor, ...]) -> None:
        if self.on and args[0].requires_grad:
            args[0].register_hook(self.moved[0].of)

    def _on_inputs(self, _: nn.Module, signals: tuple[Tensor | None, ...], __: Any) -> Any:
        if not self.on or signals[0] is None:
            return None
        new = self.changed(signals[0])
        # Its share of the gradient at the value, to which other modules may add theirs.
        self.moved[0].change(signals[0], new)
        return new, *signals[1:]


class Gradient(Fault):
    """Gradients are other ones just before the optimizer's step."""

    stages = ("gradient",)
    kinds = ("scaled", "noise", "clipped", "row", "all scaled", "all noise")

    def on_gradients(self) -> None:
        gradients = {n: p for n, p in self.model.named_parameters() if p.grad is not None}
        given = [*gradients.items()]
        if self.kind.startswith("all"):
            self.kind = self.kind[4:]
        else:
            given = [self.draw.choice(given)]
        self.name = ", ".join(name for name, _ in given[:2])
        self.modules = {owner(name) for name, _ in given}
        norms = {name: p.grad.norm().item() for name, p in given}
        whole, self.moved = nn.utils.get_total_norm([p.grad for p in gradients.values()]), []
        for name, p in given:
            new, moved = self.changed(p.grad), Moved()
            # One that is rounding alone is not defined itself.
            if norms[name] > OWN * self.task.eps * whole:
                moved.add(p.grad, new)
            self.moved.append(moved)
            p.grad = new


class State(Fault):
    """A state is another one, before a step or after it."""

    stages = ("optimizer's state",)
    kinds = ("zeroed", "scaled", "cast", "exchanged", "count")

    def on_begin(self) -> None:
        self.early = self.step > 0 and self.draw.random() < 0.6
        if self.early:
            self._change()

    def on_end(self) -> None:
        if not self.early:
            self._change()

    def _change(self) -> None:
        named = {p: name for name, p in self.model.named_parameters()}
        states = {
            (named[p], name): value
            for p, state in self.optimizer.state.items()
            for name, value in state.items()
            if isinstance(value, Tensor)
        }
        before = {key: value.clone() for key, value in states.items()}
        some = [key for key in states if (key[1] == "step") == (self.kind == "count")]
        if not some:
            return
        key = self.draw.choice(some)
        self.name, value = " of ".join(key[::-1]), states[key]
        if self.kind == "zeroed":
            value.zero_()
        elif self.kind == "scaled":
            value.mul_(self.factor)
        elif self.kind == "cast":
            value.copy_(value.to(torch.bfloat16).to(value.dtype))
        elif self.kind == "count":
            value.add_(self.draw.choice([-1, 1]))
        else:
            shape, name = value.shape, key[1]
            others = [k for k in states if k[1] == name and k != key and states[k].shape == shape]
            if others:
                other = states[self.draw.choice(others)]
                own = value.clone()
                value.copy_(other)
                other.copy_(own)
        self.modules, self.moved = set(), []
        for key, value in states.items():
            if not torch.equal(value, before[key]):
                moved = Moved()
                moved.add(before[key], value)
                self.moved.append(moved)
                self.modules.add(owner(key[0]))


class Update(Fault):
    """The optimizer does another step, or a parameter is moved otherwise."""

    stages, kinds = ("update",), ("rate", "decay", "frozen", "scaled update")

    def on_gradients(self) -> None:
        groups = self.optimizer.param_groups
        if self.kind == "decay" and "weight_decay" not in groups[0]:
            self.kind = "rate"
        self._options = [dict(group) for group in groups]
        self._before = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        for group in groups:
            if self.kind == "rate":
                group["lr"] *= self.factor
            elif self.kind == "decay":
                group["weight_decay"] += self.size

    def on_end(self) -> None:
        for group, options in zip(self.optimizer.param_groups, self._options, strict=True):
            group.update({name: options[name] for name in ("lr", "weight_decay") if name in group})
        if self.kind in ("frozen", "scaled update"):
            name, p = self.parameter()
            part = 0.0 if self.kind == "frozen" else self.factor
            p.data.copy_(self._before[name] + part * (p.data - self._before[name]))

    def judge(self, a: "Evidence", b: "Evidence") -> None:
        self.modules, self.moved = set(), []
        for name, before in a.weights.items():
            if not torch.equal(before, b.weights[name]):
                moved = Moved()
                moved.add(before, b.weights[name])
                self.moved.append(moved)
                self.modules.add(owner(name))
        # Some optimizers keep states of their updates, or add the decay to the gradient.
        if any(not torch.equal(x, b.states[key]) for key, x in a.states.items()):
            self.stages = ("optimizer's state",)


FAULTS = [Data, Random, Start, Forward, Loss, Backward, Gradient, State, Update]


@dataclass
class Evidence:
    """What a run had at the end of the fault's step."""

    gradients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[Any, Tensor] = field(default_factory=dict)


def owner(name: str) -> str:
    return name.rpartition(".")[0]


def train(
    task: Task,
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    fault: Fault,
    *,
    steps: range | None = None,
    rounding: bool = False,
) -> Evidence:
    """Trains with a trace, and with a fault in one of the steps."""
    # A step after the fault: one that was missed may be seen there.
    last = task.steps if fault.step < 0 else min(task.steps, fault.step + 2)
    steps, found = steps or range(last), Evidence()
    with Trace(model, optimizer, folder, start=steps[0], rounding=rounding) as trace:
        for step in steps:
            fault.on = step == fault.step
            if fault.on:
                fault.on_begin()
            x, y = task.rows(step)
            if fault.on:
                x, y = fault.on_data(x, y)
            optimizer.zero_grad()
            mean = torch.zeros(())
            for part in range(task.micros):
                mine = slice(part, None, task.micros)
                loss = loss_of(task, model, fault.on_loss, x[mine], y[mine]) / task.micros
                loss.backward()
                mean = mean + loss.detach()
            if task.clip:
                nn.utils.clip_grad_norm_(model.parameters(), task.clip)
            if fault.on:
                fault.on_gradients()
            optimizer.step()
            if fault.on:
                fault.on_end()
                named = {p: name for name, p in model.named_parameters()}
                for p, name in named.items():
                    found.weights[name] = p.detach().clone()
                    if p.grad is not None:
                        found.gradients[name] = p.grad.clone()
                    for key, value in optimizer.state.get(p, {}).items():
                        found.states[name, key] = torch.as_tensor(value).clone()
            trace.step(mean if task.tells else None)
    return found


def loss_of(
    task: Task, model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], x: Tensor, y: Tensor
) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=task.cast):
        return model(x, y) if task.whole else loss(model(x), y)


@dataclass
class Result:
    """One net.

    Attributes:
        said: What came out: right, not known, missed, wrong, undefined.
        text: The fault and the answer.
    """

    seed: int
    stage: str
    said: str
    text: str = ""
    family: str = ""


def planted(seed: int, rounding: bool = False) -> Result:
    """Plants a fault by a seed, and asks where it is."""
    task, draw = Task(seed), random.Random(f"fault {seed}")
    fault: Fault = draw.choice([f for f in FAULTS if task.drop or f is not Random])(task, draw)
    with TemporaryDirectory() as name:
        folder = Path(name)
        model, optimizer = task.make()
        x, y = task.rows(0)
        x, y = x[:: task.micros], y[:: task.micros]
        twin, _ = task.make()
        order = Order(twin, lambda: loss_of(task, twin, task.loss, x, y))
        torch.manual_seed(seed)
        none = nothing(task, fault.step)
        a = train(task, folder / "a", model, optimizer, none, rounding=rounding)
        model, optimizer = task.make()
        fault.install(model, optimizer, order)
        torch.manual_seed(seed)
        b = train(task, folder / "b", model, optimizer, fault, rounding=rounding)
        found = diff.compare(read_run(folder / "a"), read_run(folder / "b"))
    fault.judge(a, b)
    first = found.first
    reach = reached(a.gradients, b.gradients, task.eps)
    if found.verdict != "part" or first is None:
        said = {"same": "missed", "unknown": "not known"}[found.verdict]
    else:
        right = first.module in fault.modules
        right = right or bool({first.module, first.key.name} & fault.named)
        right = right and first.step == fault.step and first.stage in fault.stages
        said = "right" if right else "wrong"
    least = diff.rounding_of(str(torch.bfloat16 if task.cast else task.dtype)[6:])
    is_lost = (fault.reaches or "gradient" in fault.stages) and reach <= least
    if is_lost or not any(x.defined for x in fault.moved):
        said = f"undefined, {said}"
    apart = max((x.share for x in fault.moved), default=0.0)
    where = f"step {fault.step}, {' or '.join(fault.stages)}, {fault.name or 'the model'}"
    text = (
        f"{where}: {fault.kind}, moved by {apart:.2g} (size {fault.size:.2g}), gradients by "
        f"{reach:.2g}. {task.text}. Said: {words.summary(found)['answer']}"
    )
    return Result(seed, fault.stages[0], said, text, task.family)


def reached(a: Mapping[str, Tensor], b: Mapping[str, Tensor], eps: float) -> float:
    """The largest relative change of a gradient that is no rounding of the others'."""
    norms = {name: x.double().norm().item() for name, x in a.items()}
    whole, most = math.hypot(*norms.values()), 0.0
    for name, x in a.items():
        # An expert that no row goes to has none.
        other = b[name].double() if name in b else torch.zeros_like(x, dtype=torch.float64)
        size = max(norms[name], other.norm().item())
        if size > OWN * eps * whole:
            most = max(most, (x.double() - other).norm().item() / size)
    return most


def plainly(task: Task, folder: Path, rounding: bool = False) -> None:
    """Trains without a fault."""
    model, optimizer = task.make()
    torch.manual_seed(task.seed)
    train(task, folder, model, optimizer, nothing(task), rounding=rounding)


def nothing(task: Task, step: int = -1) -> Fault:
    """No fault."""
    fault = Fault(task, random.Random(0))
    fault.step = step
    return fault


def two_threads(task: Task, folder: Path) -> None:
    torch.set_num_threads(2)
    try:
        plainly(task, folder)
    finally:
        torch.set_num_threads(1)


def resumed(task: Task, folder: Path) -> None:
    at, none = 1 + task.seed % (task.steps - 1), nothing(task)
    model, optimizer = task.make()
    torch.manual_seed(task.seed)
    train(task, folder, model, optimizer, none, steps=range(at))
    saved, state = io.BytesIO(), torch.get_rng_state()
    torch.save([model.state_dict(), optimizer.state_dict()], saved)
    saved.seek(0)
    model, optimizer = task.make()
    for one, own in zip((model, optimizer), torch.load(saved), strict=True):
        one.load_state_dict(own)
    torch.set_rng_state(state)
    train(task, folder, model, optimizer, none, steps=range(at, task.steps))


def compiled(task: Task, folder: Path) -> None:
    torch.compiler.reset()
    model, optimizer = task.make()
    torch.manual_seed(task.seed)
    whole = torch.compile(model, backend="aot_eager")
    train(task, folder, whole, optimizer, nothing(task))


def checkpointed(task: Task, folder: Path) -> None:
    model, optimizer = task.make()
    net: Any = model.net if task.whole else model
    for block in net.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    torch.manual_seed(task.seed)
    train(task, folder, model, optimizer, nothing(task))


OTHERWISE: dict[str, Callable[[Task, Path], None]] = {
    "two threads": two_threads,
    "resumed": resumed,
    "compiled": compiled,
    "checkpointed": checkpointed,
}
KERNELS = "kernels of another processor"


def unplanted(kind: str, rounding: bool, seed: int) -> Result:
    """Computes a net without a fault in two ways."""
    task = Task(seed, 2 if kind == "two threads" else 1)
    if kind == "checkpointed" and task.norm == "batch":
        # A pass that is repeated counts its batch twice.
        task.norm = "group" if task.family == "images" else "layer"
    with TemporaryDirectory() as name:
        plainly(task, Path(name, "a"), rounding)
        OTHERWISE[kind](task, Path(name, "b"))
        return outcome(task, kind, Path(name))


def outcome(task: Task, kind: str, folder: Path) -> Result:
    found = diff.compare(read_run(folder / "a"), read_run(folder / "b"))
    most = max((x.distance for some in found.steps.values() for x in some), default=0.0)
    said = {"same": "the same within rounding" if most else "the same to the last digit"}
    text = f"{kind}. {task.text}. Said: {words.summary(found)['answer']}"
    return Result(task.seed, kind, said.get(found.verdict, "false alarm"), text, task.family)


def elsewhere(seeds: range, rounding: bool, python: str | None = None) -> list[Result]:
    """Nets computed by another Python and its torch; or where a simpler processor is seen."""
    results = []
    with TemporaryDirectory() as name:
        path = os.pathsep.join(filter(None, [*sys.path[:1], os.environ.get("PYTHONPATH")]))
        command = [python or sys.executable, __file__, "--write", name, "--first", str(seeds[0])]
        more = {"PYTHONPATH": path} | ({} if python else {"ATEN_CPU_CAPABILITY": "default"})
        nets = ["--nets", str(len(seeds))]
        subprocess.run([*command, *nets], check=True, env={**os.environ, **more})
        for seed in seeds:
            folder, task = Path(name, str(seed)), Task(seed)
            plainly(task, folder / "a", rounding)
            kind = f"torch {read_run(folder / 'b').steps[0].torch}" if python else KERNELS
            results.append(outcome(task, kind, folder))
    return results


SAID = ["right", "not known", "missed", "wrong"]
PLAIN = ["the same to the last digit", "the same within rounding", "false alarm"]


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.2f} %" if whole else "-"


def table(results: list[Result], by: str) -> str:
    """Counts of outcomes."""
    head = [by, "planted", "undefined", *SAID, "right", "wrong"]
    rows = [head, ["---"] * len(head)]
    kinds = sorted({getattr(r, by) for r in results})
    for kind in [*kinds, "all"]:
        some = Counter(r.said for r in results if kind in ("all", getattr(r, by)))
        defined = sum(some[name] for name in SAID)
        rows.append(
            [kind, f"{some.total():,}", f"{some.total() - defined:,}"]
            + [f"{some[name]:,}" for name in SAID]
            + [share(some[name], defined) for name in ("right", "wrong")]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def plain_table(results: list[Result]) -> str:
    rows = [["B is computed with", "nets", *PLAIN, "false alarms"], ["---"] * 6]
    for kind in [*dict.fromkeys(r.stage for r in results), "all"]:
        some = Counter(r.said for r in results if kind in ("all", r.stage))
        counts = [f"{some[name]:,}" for name in PLAIN]
        rows.append([kind, f"{some.total():,}", *counts, share(some[PLAIN[2]], some.total())])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def listed(results: Iterable[Result]) -> str:
    return "\n".join(f"- {r.seed}, {r.family}: {r.said}. {r.text}" for r in results) or "None."


def start() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")


def main() -> None:
    """Prints the tables, and saves them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--nets", type=int, default=20, help="of each kind, without a fault")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--python", action="append", default=[], help="one with another torch")
    parser.add_argument("--rounding", action="store_true", help="measure rounding in every trace")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    start()
    nets = range(args.first, args.first + args.nets)
    if args.write is not None:
        for seed in nets:
            plainly(Task(seed), args.write / str(seed) / "b", False)
        return
    today, begun = date.today().isoformat(), time.monotonic()
    faults = range(args.first, args.first + args.faults)
    with multiprocessing.get_context("spawn").Pool(args.processes, start) as pool:
        plant = partial(planted, rounding=args.rounding)
        results = []
        for one in pool.imap(plant, faults, 4):
            results.append(one)
            if one.said in (*SAID[1:], "undefined, wrong"):
                print(listed([one]), flush=True)
        spent = (time.monotonic() - begun) / max(len(results), 1)
        plain = []
        for kind in OTHERWISE:
            plain += pool.imap(partial(unplanted, kind, args.rounding), nets, 2)
    for at in range(0, len(nets), 100):
        for python in (None, *args.python):
            plain += elsewhere(nets[at : at + 100], args.rounding, python)
    command = f"--faults {args.faults} --first {args.first} --nets {args.nets}"
    command += " --rounding" * args.rounding  # whether a trace measures it
    text = [
        f"# Faults planted in random nets, {today}",
        f"{hardware()}.",
        f"`python benchmarks/trace_faults.py {command} --save`",
        f"Processes: {args.processes}; {spent:.2f} s a fault.",
        "## By stage",
        table(results, "stage"),
        "## By net",
        table(results, "family"),
        "## Without a fault",
        plain_table(plain),
        "## Wrong",
        listed(r for r in results if r.said == "wrong"),
        "## Wrong, of a fault that is not defined",
        listed(r for r in results if r.said == "undefined, wrong"),
        "## Missed and not known",
        listed(r for r in results if r.said in ("missed", "not known")),
        "## False alarms",
        listed(r for r in plain if r.said == PLAIN[2]),
    ]
    print("\n\n".join(text))
    if args.save:
        print("saved to", save("trace-faults", "\n\n".join(text) + "\n", today))


if __name__ == "__main__":
    main()
