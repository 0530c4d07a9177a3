"""Modules to choose in each of the models, and their training data."""

import torch

from tests.unit.scale.topologies import (
    WIDTH,
    CallerRelies,
    Chain,
    Checkpointed,
    Functional,
    InPlace,
    KeywordModel,
    Nested,
    Nests,
    PassThrough,
    Recurrent,
    Residual,
    Reused,
    TiedWhole,
    Transformer,
)

# Name: how it is made, and what is chosen.
CASES = {
    "sequential, identity at the end": (lambda: Chain(identity=True), {"a": 4.0, "b": 8.0, "c": 2}),
    "sequential": (Chain, {"a": 4.0, "b": 8.0, "c": 2.0}),
    "other order": (lambda: Chain(backwards=True), {"a": 4.0, "b": 8.0, "c": 2.0}),
    "residual": (Residual, {"a": 4.0, "b": 0.25}),
    "reused": (Reused, {"again": 16.0}),
    "container": (Nested, {"outer": 16.0}),
    "container and leaf": (Nested, {"outer": 16.0, "outer.1.lin": 4.0, "after": 2.0}),
    "keywords, dictionary": (KeywordModel, {"attention": 8.0, "attention.q": 4.0, "norm": 2.0}),
    "named tuple, data class": (Nests, {"split": 8.0, "join": 2.0}),
    "in place": (InPlace, {"a": 4.0, "b": 8.0, "c": 16.0, "relu": 2.0}),
    "in place outside": (InPlace, {"a": 4.0, "b": 8.0, "c.1": 16.0}),
    "caller relies on it": (CallerRelies, {"change": 4.0, "b": 8.0}),
    "recurrent": (Recurrent, {"cell": 8.0, "out": 2.0}),
    "passed through": (PassThrough, {"inner": 8.0, "inner.lin": 4.0}),
    "checkpoint": (lambda: Checkpointed(False), {"a": 4.0, "b": 8.0, "b.lin": 2.0}),
    "reentrant checkpoint": (lambda: Checkpointed(True), {"a": 4.0, "b": 8.0, "b.lin": 2.0}),
    "tied inside": (TiedWhole, {"inner": 8.0, "out": 2.0}),
    "transformer": (Transformer, {"embed": 2.0, "encoder.layers.*": 8.0, "**.linear1": 4.0}),
    "functions between": (Functional, {"a": 8.0, "b": 2.0**-3}),
}

# A chosen module changes its argument: compiled code could not hand that back.
REFUSED_COMPILED = {"in place", "caller relies on it"}
# A boundary adds up the gradients of a tensor that is used several times in another order.
REORDERED = {"keywords, dictionary"}


def model_of(case, dtype=torch.float32):
    torch.manual_seed(0)
    return CASES[case][0]().to(dtype)


def data_of(case, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(5, WIDTH, generator=draw).to(dtype)


def loss_of(model, x):
    out = model(x)
    # Weights, so that no gradient is zero because of a symmetry.
    return (out * (1 + torch.arange(out.shape[-1], device=out.device))).square().sum()
