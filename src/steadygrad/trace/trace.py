"""Writes sketches of a training's steps, by which two runs are compared."""

import json
import warnings
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from hashlib import blake2b
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree

from steadygrad._checks import InputError, check_count, check_type
from steadygrad._files import replace
from steadygrad._names import own_name
from steadygrad.distributed import data_parallel_world, process_world
from steadygrad.shards import is_copy
from steadygrad.trace.equations import PROJECTIONS
from steadygrad.trace.passes import Passes, generator_state
from steadygrad.trace.rounding import Rounding
from steadygrad.trace.sketches import Key, Sketches
from steadygrad.watch.hooks import Shared, hook_modules, is_planned


class Trace(AbstractContextManager["Trace"]):
    """Writes sketches of what each step computes, for ``steadygrad diff A B``.

    .. code-block:: python

        trace = Trace(model, optimizer, "runs/a")
        ...
        loss.backward()
        optimizer.step()
        trace.step()

    Training is the same to the bit. Of each traced step it keeps what the model was given, the
    outputs of modules, the gradients at them, those of parameters as the optimizer gets them, its
    states, the weights, its options, and digests of random generators: some hundred bytes of each
    tensor. Every process writes files of its own; none waits for another.

    Args:
        model: The model as it is called, after DDP, ``fully_shard`` and ``torch.compile``, on the
            device where it trains.
        optimizer: Its optimizer.
        folder: Where the files go; processes of a run may share it.
        every: Traces every so many steps.
        steps: Number of steps that are traced. Default: 100.
        start: Number of the first step: of a run that is resumed, the steps before.
        rounding: Whether to measure rounding at the first traced steps: two more passes of a
            micro-batch, with the weights and with the weights moved by one rounding.

    Attributes:
        number: The step under way, from 0.

    Raises:
        InputError: If the folder has traces from ``start`` on or cannot be written, or a part of
            the model is a ScriptModule or sharded otherwise than by ``fully_shard``.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        folder: str | PathLike[str],
        *,
        every: int = 1,
        steps: int = 100,
        start: int = 0,
        rounding: bool = False,
    ) -> None:
        check_type("model", model, nn.Module, "the module that the loop calls")
        # Accelerate's has one in it, which steps.
        self.optimizer = getattr(optimizer, "optimizer", optimizer)
        check_type("optimizer", self.optimizer, Optimizer, "the one that the loop steps")
        self.model, self.folder = model, Path(folder)
        self._every, self._steps = check_count("every", every), check_count("steps", steps)
        self.number = self._start = check_count("start", start, low=0)
        with warnings.catch_warnings():
            # A model may be wrapped around, as by Hugging Face's Trainer, or average by itself.
            warnings.simplefilter("ignore")
            world = data_parallel_world(model)
        self._world = world if world.size > 1 else process_world()
        self._make_folder()
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._shared = Shared(device, weakref.ref(self))
        self._sketches = Sketches()
        self._rounding = Rounding(model, self._shared, self._sketches) if rounding else None
        self._hooks = ExitStack()
        # A trace that is dropped leaves no hooks behind either.
        weakref.finalize(self, self._hooks.close)
        self._begin_step()

    def step(self, loss: Tensor | float | None = None) -> None:
        """Ends a step: call it after the optimizer's.

        Args:
            loss: The step's loss on this process, a mean, with shape ``()``; to be kept as well.
        """
        if self._hooked and self._passes.count:
            self._end_step(loss)
        self._hooks.close()
        self.number += 1
        self._begin_step()

    def close(self) -> None:
        """Takes the hooks away; the model is as it was."""
        self._hooks.close()
        self._hooked, self._steps = False, 0

    def __exit__(self, *exception: object) -> None:
        self.close()

    def begin(self, inputs: Any) -> None:
        """Begins a pass: the model is called."""
        repeated = self._rounding and self._rounding.passes
        passes = self._shared.current = repeated or self._passes
        if not torch.is_grad_enabled() or is_planned():
            self._shared.current = None
            return
        if not passes.count and not repeated:
            states = generator_state(self._shared.device)
            self._random = [blake2b(x.numpy().tobytes(), digest_size=8).hexdigest() for x in states]
            self._take_weights("start")
            self._take_states("before")
        if self._rounding is not None and not repeated:
            self._rounding.keep(passes, inputs)
        passes.begin(*inputs)

    def _make_folder(self) -> None:
        rank = self._world.rank
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            names = sorted(path.name for path in self.folder.glob(f"step-*-rank-{rank:05d}.json"))
        except OSError as error:
            raise InputError(
                f"Parameter `folder` should be a folder that can be written. Found {self.folder}: "
                f"{error.strerror}. Remedy: another one."
            ) from error
        if names and names[-1] >= f"step-{self._start:09d}":
            raise InputError(
                f"Parameter `folder` should have no trace of step {self._start} or later. Found "
                f"{names[-1]} in {self.folder}. Remedy: another folder; or start=N for a run that "
                "is resumed after N steps."
            )

    def _begin_step(self) -> None:
        at = self.number - self._start
        self._hooked = at % self._every == 0 and at // self._every < self._steps
        self._shared.current, self._sketches.found = None, {}
        self._options, self._raw = list[dict[str, Any]](), ""
        self._noise: Mapping[Key, float] = {}
        self._passes = Passes(self._sketches, self._shared.device)
        if self._hooked:
            # Now: in a forward pass `fully_shard` puts whole parameters in their places.
            named = self.model.named_parameters()
            self._named = [(own_name(name, self.model), parameter) for name, parameter in named]
            self._names: dict[Any, str] = {parameter: name for name, parameter in self._named}
            hook_modules(self.model, self._shared, self._hooks)
            hook = partial(_tell, "before_step", self._shared)
            self._hooks.enter_context(self.optimizer.register_step_pre_hook(hook))
            for name, parameter in self._named:
                if parameter.requires_grad:
                    hook = partial(_tell, "after_backward", self._shared, name)
                    self._hooks.enter_context(parameter.register_post_accumulate_grad_hook(hook))

    def after_backward(self, name: str, parameter: Tensor) -> None:
        """Takes one gradient before scales are undone and gradients are clipped."""
        if self._passes.count and self._raw in ("", name) and parameter.grad is not None:
            self._raw = name
            self._sketches.found.pop(Key("raw", name), None)  # of the micro-batches before
            self._take("raw", name, "", parameter.grad)

    def before_step(self, *_: Any) -> None:
        """Takes the gradients as the optimizer gets them, and its options."""
        self._shared.current = None
        if not self._passes.count or self._options:
            warnings.warn(
                "Expected passes of the model, a step of the optimizer, and then trace.step(). "
                f"Found a step of the optimizer {'twice' if self._options else 'before any pass'}. "
                "Remedy: call trace.step() after each one; closures are not traced.",
                stacklevel=3,
            )
            return
        self._options = [self._plain(group) for group in self.optimizer.param_groups]
        scale = getattr(self.optimizer, "grad_scale", None)  # of a fused step under a GradScaler
        for name, parameter in self._named:
            if parameter.grad is not None:
                gradient = parameter.grad if scale is None else parameter.grad / scale
                self._take("gradient", name, "", gradient)
        if self._rounding is not None:
            self._noise = self._rounding.measure(self._passes)

    def _end_step(self, loss: Tensor | float | None) -> None:
        if loss is not None:
            self._sketches.take(Key("loss", ""), torch.as_tensor(loss))
        self._take_states("state")
        self._take_weights("weight")
        whole = {
            "schema": 1,
            "step": self.number,
            "rank": self._world.rank,
            "world": self._world.size,
            "passes": self._passes.count,
            "torch": torch.__version__,
            "random": self._random,
            "options": self._options,
            "records": self._records(),
        }
        path = self.folder / f"step-{self.number:09d}-rank-{self._world.rank:05d}.json"
        try:
            replace(path, json.dumps(whole, separators=(",", ":")).encode())
        except OSError as error:
            # No reason to end a training of days.
            text = f"Expected room for a trace. Found {path}: {error.strerror}. The trace ends."
            warnings.warn(text, stacklevel=3)
            self.close()

    def _records(self) -> list[dict[str, Any]]:
        records = []
        for key, one, sums in self._sketches.numbers():
            found = {**key._asdict(), **vars(one), "noise": self._noise.get(key), "sums": None}
            short = [float(f"{x:.9g}") for x in sums]  # float32 has seven digits
            found |= {"z": short[:PROJECTIONS], "square": short[-2], "bad": int(sums[-1])}
            records.append({name: value for name, value in found.items() if value})
        return records

    def _take(self, kind: str, name: str, part: str, tensor: Tensor) -> None:
        one = self._sketches.take(Key(kind, name, part), tensor)
        if one is not None:
            one.copy = is_copy(tensor, self._world.rank)

    def _take_weights(self, kind: str) -> None:
        for name, parameter in self._named:
            self._take(kind, name, "", parameter)
        for name, buffer in self.model.named_buffers():
            self._take(kind, own_name(name, self.model), "buffer", buffer)

    def _take_states(self, kind: str) -> None:
        for parameter, state in self.optimizer.state.items():
            if parameter in self._names:
                for path, leaf in _pytree.tree_flatten_with_path(state)[0]:
                    part = ".".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in path)
                    if isinstance(leaf, (Tensor, int, float)):
                        self._take(kind, self._names[parameter], part, torch.as_tensor(leaf))

    def _plain(self, group: dict[str, Any]) -> dict[str, Any]:
        """Names of a group of parameters, and its options that are numbers or texts."""
        found = dict[str, Any]()
        for name, value in group.items():
            some = value if isinstance(value, (list, tuple)) else [value]
            single = [x.item() if isinstance(x, Tensor) and not x.ndim else x for x in some]
            if name != "params" and all(isinstance(x, (int, float, str)) for x in single):
                found[name] = single if isinstance(value, (list, tuple)) else single[0]
        names = [self._names.get(parameter, "") for parameter in group["params"]]
        return {"parameters": names, "options": found}


def _tell(method: str, shared: Shared, *call: Any) -> None:
    if (trace := shared.owner()) is not None:
        getattr(trace, method)(*call)
