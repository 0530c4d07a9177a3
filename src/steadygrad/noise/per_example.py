"""Exact squared gradient norms of single examples, during the ordinary backward pass."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.noise import example_norms as norms
from steadygrad.noise.sums import gradient_leaves
from steadygrad.numerics import exact

__all__ = ["ExampleNorms", "leave_alone"]

# Each example's gradient of the weight, and a cheaper way to its squared norm where there is one.
_Rule = tuple[Callable[..., Tensor], Callable[..., Tensor] | None]
# A layer's name, rule, and parameters' names in the model by attribute (`"weight"`, `"bias"`).
_Layer = tuple[str, _Rule, dict[str, str]]
_RULES: dict[type[nn.Module], _Rule] = {
    nn.Linear: (norms.linear_gradients, norms.linear_sq_norms),
    nn.Embedding: (norms.embedding_gradients, norms.embedding_sq_norms),
    nn.LayerNorm: (norms.norm_gradients, None),
    nn.RMSNorm: (norms.norm_gradients, None),
    nn.Conv1d: (norms.conv_gradients, norms.conv_sq_norms),
    nn.Conv2d: (norms.conv_gradients, norms.conv_sq_norms),
}

# A parameter whose gradient stays exactly zero leaves nothing to compare.
_MOST_COMPARISONS = 8
# Relative to the larger of the gradient and its examples: far above rounding, far below what a
# use of the weight outside its layer contributes.
_TOLERANCE, _TOLERANCE_HALF = 1e-2, 1e-1


class ExampleNorms:
    """Taps every layer so that a backward pass leaves its examples' squared gradient norms.

    A forward hook wraps each layer's output in an identity whose backward pass sees the layer's
    input and output gradient. No gradient changes. An example is an entry of every layer's leading
    dimension. A weight shared by several layers, or a layer called several times, holds its
    examples' gradients (``B`` times its size) until the pass is over.

    Each parameter must receive the sum of its examples' gradients. This is compared in the first
    recording, at the price of one wait for the device (in up to eight, while a gradient is exactly
    zero or not finite), and finds what a layer's hook cannot see. A gradient past all taps, as of a
    compiled region, is an error in every recording.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = _measured_layers(model)
        names = Counter(name for *_, names in self._layers.values() for name in names.values())
        self.parameter_names = list(names)
        self.enabled = True
        # Weights that are known to be used several times in a pass: first those of several layers.
        self._reused = {name for name, layers in names.items() if layers > 1}
        self._comparisons = _MOST_COMPARISONS
        self._clear()
        leaves = gradient_leaves(model)
        self.handles = [leaves[n].register_hook(self._receiver(n)) for n in self.parameter_names]
        # First in line, so that what other hooks do to the output is not taken for the layer's.
        self.handles += [
            layer.register_forward_hook(self, prepend=True, with_kwargs=True)
            for layer in self._layers
        ]

    def _clear(self) -> None:
        """Ends a recording."""
        self._examples: int | None = None
        self._squares: dict[str, Tensor] = {}
        # Examples' gradients that may still grow before they are squared.
        self._held: dict[str, Tensor] = {}
        # What is compared: sums over examples, and gradients as they arrive at the leaves, which is
        # before DDP or FSDP2 reduces them.
        self._expected: dict[str, Tensor] = {}
        self._received: dict[str, Tensor] = {}
        self._arrived: set[str] = set()
        self._half: set[str] = set()
        # Forward passes of each layer whose backward passes are to come.
        self._calls: Counter[nn.Module] = Counter()

    def __reduce__(self) -> tuple[Any, tuple[Any]]:
        # A copied or saved model is not measured.
        return partial, (leave_alone,)

    def _receiver(self, name: str) -> Callable[[Tensor], None]:
        def receive(gradient: Tensor) -> None:
            if self._examples is not None:
                self._arrived.add(name)
                if self._comparisons:
                    _add(self._received, name, gradient.detach())

        return receive

    @contextmanager
    def recording(self, num_examples: int) -> Iterator[dict[str, Tensor]]:
        r"""Measures the backward passes inside; their forward passes may lie before it.

        Yields what then has :math:`\sum_i \|h_i\|^2` by parameter, with shape ``()``, where
        :math:`h_i` is example i's gradient, divided by nothing. Empty after an error.
        """
        self._examples, squares = num_examples, dict[str, Tensor]()
        try:
            yield squares
            self._finish()
            squares |= self._squares
        finally:
            self._clear()

    def __call__(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor
    ) -> Tensor | None:
        """Wraps a layer's output; its value stays the same."""
        if not self.enabled or torch.compiler.is_compiling():
            return None
        # Inside a backward pass, checkpointing repeats a call that was counted before.
        if layer.training and torch._C._current_graph_task_id() == -1:
            self._calls[layer] += 1
        # vmap, grad and jvp take no autograd.Function of this form.
        if torch._C._are_functorch_transforms_active():
            return None
        if not (torch.is_grad_enabled() and output.requires_grad):
            return None
        inputs = args[0] if args else next(iter(kwargs.values()))
        identity: Callable[..., Tensor] = _TappedOutput.apply
        return identity(output, inputs if self._trains(layer, "weight") else None, self, layer)

    def _trains(self, layer: nn.Module, attribute: str) -> bool:
        """Whether a layer has this parameter, and it is trained now."""
        parameter = layer._parameters.get(attribute)
        known = attribute in self._layers[layer][2]
        return parameter is not None and known and parameter.requires_grad

    def measure(self, layer: nn.Module, inputs: Tensor | None, grad: Tensor) -> None:
        """Takes the gradient of a layer's output, and the layer's input if its weight trains."""
        calls = self._calls[layer]
        self._calls[layer] = max(calls - 1, 0)
        if self._examples is None:
            return
        owner, (gradients, sq_norms), names = self._layers[layer]
        features = norms.features(layer)
        if grad.dim() <= features or len(grad) != self._examples:
            raise InputError(
                f"Expected the output of layer `{owner}` to begin with {self._examples} examples"
                f" and to end with {features} dimensions of features. Found the shape "
                f"{tuple(grad.shape)}. Remedy: put the batch first, expand position indices to "
                "[B, T], or source='microbatch'."
            )
        if self._trains(layer, "bias"):
            self._take(layer, names["bias"], (norms.bias_gradients, None), None, grad)
        if inputs is not None:
            name = names["weight"]
            if name in self._held:
                self._reused.add(name)
            if calls > 1 or name in self._reused:
                sq_norms = None
            self._take(layer, name, (gradients, sq_norms), inputs, grad)

    def _take(self, layer: nn.Module, name: str, rule: _Rule, inputs: Any, grad: Tensor) -> None:
        if name in self._squares:
            self._reused.update(self.parameter_names)
            raise RuntimeError(
                f"Expected all forward passes of layer `{self._layers[layer][0]}` before its first "
                "backward pass. Found one after it. Remedy: add the losses and call backward once; "
                "a second attempt will also succeed."
            )
        gradients, sq_norms = rule
        if sq_norms is None:
            each = gradients(layer, inputs, grad)
            _add(self._held, name, each)
        else:
            self._squares[name] = sq_norms(layer, inputs, grad).sum()
            if self._comparisons:
                each = gradients(layer, *_as_one_example(norms.features(layer), inputs, grad))
        if self._comparisons:
            _add(self._expected, name, each.sum(0))
            self._half |= {name} if grad.dtype.itemsize < 4 else set()

    def _finish(self) -> None:
        for name, gradients in self._held.items():
            self._squares[name] = torch.linalg.vector_norm(gradients).square()
        unseen = sorted(self._arrived - self._squares.keys())
        if unseen and self.enabled:
            raise InputError(
                f"Expected a call of the layer that owns `{unseen[0]}` where forward hooks run. "
                "Found a gradient without one: of a torch.compile'd region, or of a weight that is "
                "used directly. Remedy: source='microbatch'."
            )
        if self._comparisons:
            self._comparisons = 0 if self._compare() else self._comparisons - 1

    def _compare(self) -> bool:
        """Whether all gradients could be compared with their examples' sums, and agree."""
        names = [name for name in self._expected if name in self._received]
        rows = []
        for name in names:
            received, dtype = self._received[name], exact(self._received[name].device)
            self._half |= {name} if received.dtype.itemsize < 4 else set()
            received = (received.to_dense() if received.is_sparse else received).to(dtype)
            difference = (received - self._expected[name].to(dtype)).square().sum()
            size = received.square().sum() + self._squares[name].to(dtype)
            rows.append(torch.stack([difference, size]).cpu())
        read = torch.stack(rows).tolist() if rows else []
        for name, (difference, size) in zip(names, read, strict=True):
            tolerance = _TOLERANCE_HALF if name in self._half else _TOLERANCE
            if difference > tolerance**2 * size:
                raise InputError(
                    f"Expected the gradient of `{name}` to be the sum of its layer's examples. "
                    f"Found a relative difference of {(difference / size) ** 0.5:.2g}: it is also "
                    "used outside its layer (F.linear(x, embedding.weight), a penalty), or a hook "
                    "changes its gradient. Remedy: a layer that shares it, or source='microbatch'."
                )
        # After an overflow, or an empty batch, nothing has been compared.
        return bool(read) and all(0 < size < float("inf") for _, size in read)


class _TappedOutput(torch.autograd.Function):
    """The identity on a layer's output; its backward pass measures."""

    @staticmethod
    def forward(
        ctx: Any, output: Tensor, inputs: Tensor | None, owner: ExampleNorms, layer: nn.Module
    ) -> Tensor:
        # Saved, not referenced: checkpointing and saved-tensor hooks apply.
        ctx.save_for_backward(inputs)
        ctx.owner, ctx.layer = owner, layer
        # Not a view as autograd sees it, so that in-place operations may follow.
        return output.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        with torch.no_grad(), torch.autocast(grad.device.type, enabled=False):
            ctx.owner.measure(ctx.layer, *ctx.saved_tensors, grad)
        return grad, None, None, None


def leave_alone(*_: object) -> None:
    """The hook that a copied model carries in place of one that measures."""


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value if name in sums else value


def _as_one_example(features: int, inputs: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """All examples as one, where the shapes allow it: no ``[B, V, D]`` is formed."""
    if features > 1:
        return inputs, grad
    rows = inputs.flatten(0, -1 if inputs.dim() < grad.dim() else -2)
    return rows.unsqueeze(0), grad.flatten(0, -2).unsqueeze(0)


def _measured_layers(model: nn.Module) -> dict[nn.Module, _Layer]:
    """The layers that own a trainable parameter, in the model's order."""
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    rules, measured = _RULES, dict[nn.Module, _Layer]()
    if (library := sys.modules.get("transformers.pytorch_utils")) is not None:
        # GPT-2 and its like: a linear layer whose weight is transposed.
        rules = {**_RULES, library.Conv1D: (_transposed, norms.linear_sq_norms)}
    for name, module in model.named_modules():
        own = {k: p for k, p in module._parameters.items() if p is not None and id(p) in names}
        rule = _rule_for(module, rules)
        if not own:
            continue
        unknown = [k for k in own if rule is None or k not in ("weight", "bias")]
        if rule is None or unknown:
            where = f"layer `{name}`" if name else "the model itself"
            supported = ", ".join(kind.__name__ for kind in _RULES)
            raise InputError(
                f"Expected every trainable parameter in a layer of type {supported}. Found "
                f"`{unknown[0]}` in {where} ({type(module).__name__}). "
                "Remedy: source='microbatch', which measures any layer."
            )
        measured[module] = name, rule, {attribute: names[id(p)] for attribute, p in own.items()}
    return measured


def _transposed(layer: nn.Module, inputs: Tensor, grads: Tensor) -> Tensor:
    return norms.linear_gradients(layer, inputs, grads).mT


def _rule_for(module: nn.Module, rules: dict[type[nn.Module], _Rule]) -> _Rule | None:
    """The rule for a layer that computes as its torch class does, else None."""
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        # It divides by counts over the whole batch: examples are no longer a sum.
        return None
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        # nn.MultiheadAttention reads its weight and never calls it.
        return None
    for kind, rule in rules.items():
        if isinstance(module, kind) and type(module).forward is kind.forward:
            return rule
    return None
