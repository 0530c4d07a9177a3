"""Sources of a step's parts: contexts, backward passes that are found, single examples."""

import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdRef

from steadygrad._checks import InputError, check_count, check_number
from steadygrad.noise.equations import SignalNoise
from steadygrad.noise.per_example import ExampleNorms, leave_alone
from steadygrad.noise.sums import Sums, gradient_leaves, values_of
from steadygrad.numerics import exact

# A micro-batch before it counts: its samples, and its weight and loss scale if they were given.
Part = tuple[int, Tensor | float | None, Tensor | float | None]
# The tensors that the model was given, each with its version.
_Given = tuple[tuple[WeakIdRef, int], ...]
# A call of a layer: the layer, the layers of the parts that went through it, and, for the model's
# own call, what it was given.
_Call = tuple[nn.Module, set[nn.Module], _Given]

# Passes of a step whose tensors are remembered; more are hardly one step's.
_MOST_GIVEN = 1024


class Repeats:
    """Marks the calls of the model and of up to four layers that own measured parameters.

    Two losses of the same samples, each with a backward pass of its own, are no two micro-batches,
    and a penalty on the weights is none.
    """

    def __init__(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        owners = {p: module for module in model.modules() for p in module._parameters.values()}
        chosen = {owners[p]: p for p in parameters[:: -(-len(parameters) // 4)] if p in owners}
        self._model = model
        self.handles = [
            module.register_forward_hook(self, with_kwargs=True)
            for module in {**chosen, model: None}
            if not isinstance(module, torch.jit.ScriptModule)  # takes no hooks
        ]
        self._seen = self._said = False
        self.turn()
        self.begin()

    def turn(self) -> None:
        """Begins a step."""
        self._given: dict[_Given, None] = {}

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        # A copied or saved model is not measured.
        return partial, (leave_alone,)

    def begin(self, several: bool = False) -> None:
        """Begins a part, of one backward pass or of several."""
        self._several, self._task = several, -1
        self._calls: list[_Call] = []

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        """Marks a call; not a checkpoint's second one, which is inside a backward pass."""
        if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
            return
        nodes = [x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn]
        if nodes and torch._C._current_graph_task_id() == -1:
            leaves = tree_leaves((args, kwargs)) if module is self._model else ()
            tensors = [x for x in leaves if isinstance(x, Tensor)]
            given = ((WeakIdRef(x), -1 if x.is_inference() else x._version) for x in tensors)
            call: _Call = (module, set(), tuple(given))
            nodes[0].register_prehook(lambda _: self._pass(call))

    def _pass(self, call: _Call) -> None:
        task = torch._C._current_graph_task_id()
        if task != self._task and not self._several:
            self.begin()
        self._task = task
        self._calls.append(call)

    def end(self) -> str:
        """Ends a part; says why the part is no micro-batch of its own, empty if it is one.

        Its samples are an earlier part's if the model was given the same tensors, or if both went
        through one call, and this one through no layer of that part anew.
        """
        calls = self._calls
        anew = {module for module, part, _ in calls if not part}
        repeated = any(part and not part & anew for _, part, _ in calls)
        for _, part, _ in calls:
            part.update(module for module, *_ in calls)
        given = {tensors: None for *_, tensors in calls if tensors}
        repeated |= not given.keys().isdisjoint(self._given)
        self._given |= given
        while len(self._given) > _MOST_GIVEN:
            del self._given[next(iter(self._given))]
            self._say_too_many()
        alien, self._seen = self._seen and not calls, self._seen or bool(given)
        self.begin()
        if alien:
            return "one without a forward pass of the model, as of a penalty on its weights"
        return "a second one of the same samples, as of two losses" if repeated else ""

    def _say_too_many(self) -> None:
        if not self._said:
            self._said = True
            warnings.warn(
                f"Expected noise.step() in each optimizer step. Found {_MOST_GIVEN} backward "
                "passes without it; the tensors of older ones are forgotten. Remedy: call "
                "noise.step(), drop_step() or remove().",
                stacklevel=6,
            )


class Source:
    """Opens and closes the parts of a step, and feeds sums the gradient that each adds to `.grad`.

    - ``"microbatch"``: a hook on a leaf runs once a backward pass with the summed gradient of all
      the leaf's uses, before it is added to ``.grad`` and before DDP or FSDP2 reduces it. Outside
      of contexts, each backward pass is a part.
    - ``"per_example"``: taps measure every example's own norm; the witness's elements are taken
      from the leaves.
    - ``"accumulated"``: the difference that a part makes to ``.grad``, which with FSDP2 is reduced,
      so that each part must synchronise. Costs a copy; differences of 16-bit sums lose digits.

    ``loss_scale`` asks for the scale that gradients carry now; ``told`` is the next backward pass,
    if it was announced.
    """

    def __init__(
        self,
        kind: str,
        model: nn.Module,
        sums: Sums,
        *,
        samples: Callable[[], int] | int | None,
        accumulation: str,
        loss_scale: Callable[[], Tensor | float],
    ) -> None:
        self._kind, self._sums = kind, sums
        self._samples, self._accumulation, self._loss_scale = samples, accumulation, loss_scale
        # First, as it may refuse the model.
        self._taps = ExampleNorms(model) if kind == "per_example" else None
        self._repeats = Repeats(model, sums.parameters)
        leaves = gradient_leaves(model)
        slots = {"microbatch": range(len(sums.names)), "per_example": sums.witness.slots}
        self._handles = [
            leaves[sums.names[slot]].register_hook(self._hook(slot, leaves[sums.names[slot]]))
            for slot in slots.get(kind, ())
        ]
        self._handles += self._repeats.handles + (self._taps.handles if self._taps else [])
        self._enabled, self._in_context = True, False
        self._pass = self._asked = -1
        self._accumulates = False
        self._open: Part | None = None
        self.clear()

    def clear(self) -> None:
        """Starts a new step."""
        self.finish()
        self.told: Part | None = None
        self._open = None
        self._last: Part | None = None
        self._alien, self._without_samples = "", False
        self._repeats.turn()
        self._sums.clear()

    def enable(self, active: bool) -> None:
        """Says whether the passes to come are measured, before their forward passes."""
        self._enabled = active
        if self._taps is not None:
            self._taps.enabled = active

    def remove(self) -> None:
        """Takes every hook off the model."""
        for handle in self._handles:
            handle.remove()

    def part(
        self,
        samples: int,
        weight: Tensor | float | None = None,
        loss_scale: Tensor | float | None = None,
    ) -> Part:
        """The next micro-batch, checked, which counts once it is closed."""
        if check_count("num_samples", samples, low=0) == 0:
            return 0, None, None
        if self._last is not None and (self._last[1] is None) is not (weight is None):
            raise InputError(
                "Expected a weight for all micro-batches of a step or for none. Found both. "
                "Remedy: give each one its weight, or leave it to `accumulation`."
            )
        return samples, None if weight is None else _checked(weight), loss_scale

    @contextmanager
    def context(self, part: Part) -> Iterator[None]:
        """A context around a part's backward pass."""
        if self._open is not None:
            raise InputError(
                "Expected one micro-batch at a time. Found one inside another. "
                "Remedy: leave the first before the second is entered."
            )
        if not self._enabled:
            yield
            return
        self.told, self._open, self._in_context = None, part, True
        self._repeats.begin(several=True)
        try:
            with self._gradients(part[0]):
                yield
        except BaseException:
            self._spoil()
            raise
        finally:
            self._in_context = False
        self._close()

    @contextmanager
    def _gradients(self, samples: int) -> Iterator[None]:
        """Feeds the sums from taps or from ``.grad``, where no hook feeds them."""
        sums = self._sums
        if self._taps is not None:
            with self._taps.recording(samples) as squares:
                yield
            for slot, name in enumerate(sums.names):
                if name in squares:
                    sums.see_norm(slot, squares[name].sqrt())
        elif self._kind == "accumulated":
            grads = (p.grad for p in sums.parameters)
            before = [None if grad is None else values_of(grad).clone() for grad in grads]
            yield
            for slot, (old, parameter) in enumerate(zip(before, sums.parameters, strict=True)):
                if parameter.grad is not None:
                    new = values_of(parameter.grad)
                    sums.see(slot, new if old is None else new - old)
        else:
            yield

    def _hook(self, slot: int, leaf: Tensor) -> Callable[[Tensor], None]:
        see = self._sums.see if self._kind == "microbatch" else self._sums.witness.see

        def hook(gradient: Tensor) -> None:
            counts = self._adds_to_grad if self._in_context else self._is_found
            if counts(leaf):
                # It has a history of its own only under create_graph=True.
                see(slot, values_of(gradient.detach() if gradient.requires_grad else gradient))

        return hook

    def _adds_to_grad(self, leaf: Tensor) -> bool:
        """Whether the present pass adds to ``.grad``, which ``torch.autograd.grad`` does not."""
        number = torch._C._current_graph_task_id()
        if number != self._asked:
            # Not kept: the engine remembers the stream on which this node was made.
            with torch.enable_grad():
                view: Any = leaf.view_as(leaf)
            node, self._asked = view.grad_fn.next_functions[0][0], number
            try:
                self._accumulates = torch._C._will_engine_execute_node(node)
            except RuntimeError as error:
                # The engine refuses to say it of leaves whose gradients it hands to the caller.
                if "autograd.grad" not in str(error):
                    raise
                self._accumulates = False
        return self._accumulates

    def _is_found(self, leaf: Tensor) -> bool:
        """Whether the gradient that arrives now is of a measured pass outside of contexts."""
        if not self._enabled or self._kind != "microbatch":
            return False
        number = torch._C._current_graph_task_id()
        if number != self._pass:
            if not self._adds_to_grad(leaf):
                return False
            self._enter(number)
        return self._open is not None

    def _enter(self, number: int) -> None:
        nested = _inside_a_backward_function()
        if nested and self._open is not None:
            return  # a reentrant checkpoint, whose gradients are of the pass around it
        self.finish()
        self._pass = number
        part, self.told = self.told, None
        if part is None and self._samples is not None:
            part = self.part(self._samples() if callable(self._samples) else self._samples)
        self._open = part
        if part is None:
            return
        if nested:
            raise InputError(
                "Expected backward passes whose first gradient of a parameter arises outside of "
                "reentrant checkpoints. Found one inside, where the end of the whole pass is not "
                "known. Remedy: checkpoint(..., use_reentrant=False), or a `with "
                "noise.microbatch(n)` around the pass."
            )
        torch.autograd.Variable._execution_engine.queue_callback(self._leave)

    @torch.no_grad()
    def _leave(self) -> None:
        self._pass = -1
        self._close()

    def finish(self) -> None:
        """Spoils the step if a pass has not ended: after an error autograd does not call back."""
        self._pass = -1
        if self._open is not None and not self._in_context:
            self._spoil()

    def _spoil(self) -> None:
        # What this backward pass has added to .grad is unknown: the step cannot be measured.
        self._open, self._sums.broken = None, True
        self._repeats.begin()
        self._sums.drop_part()

    def _close(self) -> None:
        """Ends the open part."""
        part, self._open = self._open, None
        assert part is not None
        alien = self._repeats.end()
        samples, weight, loss_scale = part
        if not samples:
            self._sums.drop_part()
            self._without_samples = True
            return
        self._alien, self._last = self._alien or alien, part
        if weight is None:
            weight = samples if self._accumulation == "samples" else 1.0
        scale = self._loss_scale() if loss_scale is None else loss_scale
        parts = samples if self._kind == "per_example" else 1
        self._sums.end_part(weight, samples, parts, scale)

    def measure(self, grad_scale: Tensor | float | None) -> SignalNoise:
        """Signal and noise of the step; ``grad_scale`` is still in ``.grad``, None if not told."""
        sums = self._sums
        _, weight, scale = self._last or (0, None, None)
        scale = scale if grad_scale is None else grad_scale
        scale = self._loss_scale() if scale is None else scale
        # From the weights that were assumed for the parts to the true ones.
        factor: Any = 1.0
        if weight is None and not sums.broken:
            if self._accumulation == "mean":
                factor = 1 / (sums.a or 1.0)
            elif self._accumulation == "samples":
                factor = sums.together / (sums.samples or 1)
        return sums.measure(factor, scale)

    def wrong(self) -> InputError | None:
        """The reason why the whole step cannot be measured, if there is one to tell."""
        sums = self._sums
        if sums.broken:
            return None
        if self._alien:
            return InputError(
                "Expected one backward pass over the forward pass of each micro-batch. Found "
                f"{self._alien}. Remedy: add the losses up before backward(), or make "
                "NoiseScale(source='accumulated') with one `with noise.microbatch(n)` around all "
                "passes of the same samples."
            )
        # Where another process may have parts, one will do, or none if all samples are masked.
        needed = 2 if sums.world.size == sums.together else 1 - self._without_samples
        if sums.parts < needed:
            return InputError(
                f"Expected at least {needed} parts a step. Found {sums.parts}. Remedy: split "
                "the batch into micro-batches, each in `with noise.microbatch(n)` (only "
                "source='microbatch' finds them by `samples`), or use source='per_example'."
            )
        return None


def _checked(weight: Tensor | float) -> Tensor | float:
    """A positive number; a tensor stays on its device, and is NaN if negative."""
    if not isinstance(weight, Tensor):
        return check_number("weight", weight, low=0, low_open=True)
    weight = weight.detach().reshape(()).to(exact(weight.device))
    return torch.where(weight >= 0, weight, torch.nan)


def _inside_a_backward_function() -> bool:
    """Whether a Python function's backward has begun the backward pass that runs now."""
    codes = (frame.f_code for frame, _ in traceback.walk_stack(None))
    return BackwardCFunction.apply.__code__ in codes
