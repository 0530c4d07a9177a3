"""Layers whose gradients can be found for each example, and the formulas for them."""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from steadygrad._checks import InputError, check_choice
from steadygrad.formulas import example_norms as formulas

__all__ = ["LayerRule", "MeasuredLayer", "measured_layers"]


@dataclass(frozen=True)
class LayerRule:
    """Rule by which one type of layer is measured; every function takes the layer first.

    Attributes:
        features: Number of trailing dimensions of the output that are neither examples nor
            positions.
        weight: The weight's gradient of each example, from ``(layer, input, grad)``.
        weight_sq_norms: Squared norms of the weight's gradients, if there is a cheaper way.
        bias: The bias's gradient of each example, from ``(layer, grad)``.
    """

    features: Callable[[Any], int]
    weight: Callable[[Any, Tensor, Tensor], Tensor]
    weight_sq_norms: Callable[[Any, Tensor, Tensor], Tensor] | None = None
    bias: Callable[[Any, Tensor], Tensor] | None = None


@dataclass(frozen=True)
class MeasuredLayer:
    """A layer and the names that its measured parameters have in the model.

    Attributes:
        name: The layer's qualified name.
        module: The layer.
        rule: Rule by which it is measured.
        parameters: The parameter's name in the model, by attribute (``"weight"``, ``"bias"``).
        tied: Names of parameters that belong to another layer as well.
    """

    name: str
    module: nn.Module
    rule: LayerRule
    parameters: dict[str, str]
    tied: frozenset[str]


def _geometry(layer: nn.Conv1d | nn.Conv2d) -> formulas.ConvGeometry:
    return formulas.ConvGeometry(
        layer.kernel_size,
        layer.stride,
        layer.padding,
        layer.dilation,
        layer.groups,
        layer.padding_mode,
    )


_LINEAR = LayerRule(
    features=lambda layer: 1,
    weight=lambda layer, x, g: formulas.linear_weight_gradients(x, g),
    weight_sq_norms=lambda layer, x, g: formulas.linear_weight_sq_norms(x, g),
    bias=lambda layer, g: formulas.linear_bias_gradients(g),
)
_EMBEDDING = LayerRule(
    features=lambda layer: 1,
    weight=lambda layer, x, g: formulas.embedding_gradients(
        x, g, layer.num_embeddings, layer.padding_idx
    ),
    weight_sq_norms=lambda layer, x, g: formulas.embedding_sq_norms(
        x, g, layer.num_embeddings, layer.padding_idx
    ),
)
_LAYER_NORM = LayerRule(
    features=lambda layer: len(layer.normalized_shape),
    weight=lambda layer, x, g: formulas.layer_norm_weight_gradients(
        x, g, layer.normalized_shape, layer.eps
    ),
    bias=lambda layer, g: formulas.norm_bias_gradients(g, layer.normalized_shape),
)
_RMS_NORM = LayerRule(
    features=lambda layer: len(layer.normalized_shape),
    weight=lambda layer, x, g: formulas.rms_norm_weight_gradients(
        x, g, layer.normalized_shape, layer.eps
    ),
)
_CONV = LayerRule(
    features=lambda layer: 1 + len(layer.kernel_size),
    weight=lambda layer, x, g: formulas.conv_weight_gradients(x, g, _geometry(layer)),
    weight_sq_norms=lambda layer, x, g: formulas.conv_weight_sq_norms(x, g, _geometry(layer)),
    bias=lambda layer, g: formulas.conv_bias_gradients(g),
)

# Hugging Face's Conv1D, of GPT-2 and its like: a linear layer whose weight is transposed.
_TRANSPOSED = replace(_LINEAR, weight=lambda layer, x, g: formulas.linear_weight_gradients(x, g).mT)

_NORMS: dict[type[nn.Module], LayerRule] = {nn.LayerNorm: _LAYER_NORM, nn.RMSNorm: _RMS_NORM}
_RULES: dict[type[nn.Module], LayerRule] = {
    nn.Linear: _LINEAR,
    nn.Embedding: _EMBEDDING,
    **_NORMS,
    nn.Conv1d: _CONV,
    nn.Conv2d: _CONV,
}


def measured_layers(model: nn.Module, layers: str) -> list[MeasuredLayer]:
    """Finds the layers to measure.

    Args:
        model: The model, wrapped or not.
        layers: ``"all"`` or ``"norm"`` (LayerNorm and RMSNorm only).

    Returns:
        The layers that own a trainable parameter, in the model's order.

    Raises:
        InputError: If ``layers="all"`` and a trainable parameter belongs to a layer of another
            type, or if nothing is left to measure.
    """
    check_choice("layers", layers, ("all", "norm"))
    names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    owners = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    rules = _rules() if layers == "all" else _NORMS
    found = []
    for name, module in model.named_modules():
        own = {k: p for k, p in module._parameters.items() if p is not None and p.requires_grad}
        rule = _rule_for(module, rules)
        if not own or (rule is None and layers == "norm"):
            continue
        unknown = [k for k in own if rule is None or k not in ("weight", "bias")]
        if rule is None or unknown:
            raise _unsupported(name, module, unknown[0])
        tied = frozenset(names[id(p)] for p in own.values() if owners[id(p)] > 1)
        parameters = {k: names[id(p)] for k, p in own.items()}
        found.append(MeasuredLayer(name, module, rule, parameters, tied))
    if not found:
        kind = "layer" if layers == "all" else "LayerNorm or RMSNorm"
        raise InputError(
            f"Expected a model with at least one trainable {kind} to measure. Found none. "
            "Remedy: source='microbatch'."
        )
    return found


def _rules() -> dict[type[nn.Module], LayerRule]:
    """Rules for torch's layers, and for the layers of a library that is in use."""
    library = sys.modules.get("transformers.pytorch_utils")
    return _RULES if library is None else {**_RULES, library.Conv1D: _TRANSPOSED}


def _rule_for(module: nn.Module, rules: dict[type[nn.Module], LayerRule]) -> LayerRule | None:
    """The rule for a layer that computes as its torch class does, else None."""
    if isinstance(module, nn.Embedding) and module.scale_grad_by_freq:
        # It divides by counts over the whole batch: examples are no longer a sum.
        return None
    if isinstance(module, nn.modules.linear.NonDynamicallyQuantizableLinear):
        # nn.MultiheadAttention reads its weight and never calls it.
        return None
    for torch_class, rule in rules.items():
        if isinstance(module, torch_class) and type(module).forward is torch_class.forward:
            return rule
    return None


def _unsupported(name: str, module: nn.Module, parameter: str) -> InputError:
    where = f"layer `{name}`" if name else "the model itself"
    supported = ", ".join(torch_class.__name__ for torch_class in _RULES)
    return InputError(
        f"Expected every trainable parameter in a layer that per-example norms cover "
        f"({supported}). Found `{parameter}` in {where} ({type(module).__name__}). "
        "Remedy: layers='norm' measures the norm layers only, source='microbatch' any layer."
    )
