"""Which modules patterns choose, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from steadygrad.scale.layers import automatic_layers
from tests.unit.scale.topologies import Block, Tied, TiedWhole
from tests.unit.scale.training import Model


def scales(model, wanted, **options):
    found = LayerwiseGradScaler(model, wanted, **options).get_scales()
    del found[""]
    return found


def blocks():
    return nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block()))


def test_patterns_go_by_parts_of_names():
    assert scales(blocks(), {"0.*": 2.0}) == {"0.0": 2.0, "0.1": 2.0}
    assert scales(blocks(), {"*.0.lin": 2.0}) == {"0.0.lin": 2.0, "1.0.lin": 2.0}
    assert set(scales(blocks(), {"**.lin": 2.0})) == {"0.0.lin", "0.1.lin", "1.0.lin"}
    assert scales(blocks(), {"*": 2.0, "1": 8.0}) == {"0": 2.0, "1": 8.0}
    assert scales(blocks(), {"[01].0.l?n": 2.0, "1.**": 4.0}) == {
        "0.0.lin": 2.0,
        "1": 4.0,
        "1.0": 4.0,
        "1.0.lin": 4.0,
    }


def test_names_are_those_inside_wrappers():
    compiled = torch.compile(Model())
    assert scales(compiled, {"b.*": 2.0}) == {"b.0": 2.0, "b.1": 2.0}
    assert scales(nn.Sequential(compiled), {"0.a": 2.0}) == {"0.a": 2.0}


def test_one_module_under_two_names_is_one_layer():
    model = nn.Sequential(Block())
    model.alias = model[0]
    assert scales(model, {"alias": 2.0}) == {"alias": 2.0}
    assert scales(model, {"0": 2.0, "alias": 4.0}) == {"0": 4.0}


def test_automatic_layers_are_the_parts_that_a_model_is_made_of():
    assert automatic_layers(Model()) == ["a", "b.0", "b.1", "head"]
    assert automatic_layers(blocks()) == ["0.0", "0.1", "1.0"]
    assert automatic_layers(TiedWhole()) == ["inner", "out"]
    assert automatic_layers(Tied()) == []
    assert scales(Model(), AutoScale(layers=("b",), scale=4.0)) == {"b": 4.0}


class Listed(nn.Module):
    """A list of parameters, and modules in one that has no forward."""

    def __init__(self):
        super().__init__()
        self.extra, self.body = nn.ParameterList([nn.Parameter(torch.ones(4))]), nn.Module()
        self.body.a, self.body.b = Block(), Block()


class RootTied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(5, 6), nn.ModuleList([Block(), Block()])
        self.head_weight = self.embed.weight


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.h = nn.Embedding(5, 6), nn.ModuleList([Block(), Block()])

    def forward(self, x):
        raise AssertionError  # only looked at


class Tail(nn.Module):
    """As language models are built: a body, and a head with the weights of its embedding."""

    def __init__(self):
        super().__init__()
        self.transformer, self.lm_head = Body(), nn.Linear(6, 5, bias=False)
        self.lm_head.weight = self.transformer.wte.weight


class Headed(nn.Module):
    """As Hugging Face's classifiers: all blocks in a body, beside a small head."""

    def __init__(self, head):
        super().__init__()
        self.bert, self.dropout, self.head = Body(), nn.Dropout(), nn.Linear(6, head)


class Shares(nn.Module):
    """A module that is a part, and lies in another part as well."""

    def __init__(self):
        super().__init__()
        self.shared, self.body = Block(), Body()
        self.body.tail = self.shared


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.net, self.loss = inner, nn.MSELoss()


def test_automatic_layers_are_found_behind_lists_ties_and_wrappers():
    assert automatic_layers(Listed()) == ["body.a", "body.b"]
    assert automatic_layers(RootTied()) == ["blocks.0", "blocks.1"]
    assert automatic_layers(Tail()) == ["transformer.h.0", "transformer.h.1"]
    assert automatic_layers(Headed(2)) == ["bert.wte", "bert.h.0", "bert.h.1", "dropout", "head"]
    # A module in two places is one part, wherever it lies.
    assert automatic_layers(Tower()) == ["shared", "inner.0"]
    shares = ["shared", "body.wte", "body.h.0", "body.h.1"]
    assert automatic_layers(Shares()) == shares
    assert set(scales(Shares(), "auto")) == set(shares)
    assert automatic_layers(Wrapped(Model())) == ["net.a", "net.b.0", "net.b.1", "net.head", "loss"]
    assert automatic_layers(Wrapped(Tail())) == [
        "net.transformer.h.0",
        "net.transformer.h.1",
        "loss",
    ]
    # What would be nothing if it was taken apart stays whole.
    assert automatic_layers(Wrapped(Tied())) == ["net", "loss"]


class Tower(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.inner = Block(), nn.Sequential(Block())
        self.inner.append(self.shared)


MODEL_ERRORS = {
    "no match": (Model, {"heads": 2.0}, "Found 'heads'"),
    "tied": (Tied, {"up": 2.0}, "'up.weight', in the chosen 'up', .*'down.weight', in no chosen"),
    "tied, both": (Tied, {"up": 2.0, "down": 2.0}, "'down.weight', in the chosen 'down'"),
    "shared": (Tower, {"inner": 2.0}, "'shared.lin.weight', in no .*, in the chosen 'inner'"),
    "shared, chosen": (
        Tower,
        {"inner": 2.0, "shared": 4.0},
        "'inner.1.lin.weight', in the chosen 'inner' and 'shared'",
    ),
    "zero": (Model, {"a": 0.0}, r"layer_scales\['a'\]"),
    "negative": (Model, {"a": -2.0}, r"layer_scales\['a'\]"),
    "infinite": (Model, {"a": float("inf")}, r"layer_scales\['a'\]"),
    "text": (Model, {"a": "2"}, r"layer_scales\['a'\]"),
    "no mapping": (Model, [("a", 2.0)], "`layer_scales` .* of type list. Remedy: {'blocks"),
    "other word": (Model, "automatic", "`layer_scales` .* of type str"),
    "fixed": (Model, {"a": LayerScale(-2.0, fixed=True)}, r"layer_scales\['a'\]"),
}


@pytest.mark.parametrize("case", MODEL_ERRORS)
def test_refuses_choices(case):
    make, wanted, told = MODEL_ERRORS[case]
    model = make()
    with pytest.raises(ValueError, match=told) as error:
        LayerwiseGradScaler(model, wanted)
    assert "Remedy: " in str(error.value)
    # And leaves the model as it was.
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


OPTION_ERRORS = {
    "growth_factor": {"growth_factor": 0.5},
    "backoff_factor": {"backoff_factor": 1.5},
    "growth_interval": {"growth_interval": 0},
    "min_scale": {"min_scale": 4.0, "max_scale": 2.0},
    "max_scale": {"max_scale": -1.0},
    "init_scale": {"init_scale": 0.0},
    "process_group": {"process_group": "some"},
}


@pytest.mark.parametrize("name", OPTION_ERRORS)
def test_refuses_options(name):
    model = Model()
    with pytest.raises(ValueError, match=f"Parameter `{name}`.*Remedy: "):
        LayerwiseGradScaler(model, {"a": 2.0}, **OPTION_ERRORS[name])
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


AUTO_ERRORS = {
    "AutoScale.scale": {"scale": 0.0},
    "AutoScale.underflow": {"underflow": 2.0},
    "AutoScale.headroom": {"headroom": -1},
    "AutoScale.every": {"every": 0},
    "AutoScale.warmup": {"warmup": -1},
}


@pytest.mark.parametrize("told", AUTO_ERRORS)
def test_refuses_automatic_options(told):
    with pytest.raises(ValueError, match=told):
        AutoScale(**AUTO_ERRORS[told])


def test_refuses_something_that_is_no_model():
    with pytest.raises(ValueError, match=r"of type dict\. Remedy: hand in the model first"):
        LayerwiseGradScaler({"a": 2.0}, Model())


def test_refuses_tensors_hidden_in_objects():
    class Box:
        def __init__(self, value):
            self.value = value

    class Boxed(nn.Linear):
        def forward(self, x):
            return Box(super().forward(x))

    model = nn.Sequential(Boxed(4, 4))
    _scaler = LayerwiseGradScaler(model, {"0": 2.0})
    with pytest.raises(
        ValueError, match=r"an output of '0' to be .* a Box .* Remedy: `vars\(y\)`.* torch"
    ):
        model(torch.ones(2, 4))


def test_a_module_has_one_scaler():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first = LayerwiseGradScaler(model, {"0": 2.0})
    with pytest.raises(InputError, match=r"Expected '0' .*around '0'"):
        LayerwiseGradScaler(model, {"*": 4.0})
    around = nn.Sequential(nn.Sequential(model))
    with pytest.raises(InputError, match=r"Expected '0' .*around '0.0.0'"):
        LayerwiseGradScaler(around, {"0": 4.0})
    # Others may have a scaler of their own.
    second = LayerwiseGradScaler(model, {"1": 8.0})
    model(torch.ones(2, 4)).sum().backward()
    assert model[1].bias.grad.tolist() == [16.0] * 4
    # A copy has hooks that belong to no scaler.
    copied = LayerwiseGradScaler(copy.deepcopy(model), {"*": 4.0})
    assert copied.get_scales() == {"": 1.0, "0": 4.0, "1": 4.0}
    first.remove()
    second.remove()
    assert LayerwiseGradScaler(model, {"*": 4.0}).get_scales() == copied.get_scales()


def test_a_scaler_within_anothers_module_is_refused():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    _scaler = LayerwiseGradScaler(model, {"0": 2.0})
    with pytest.raises(InputError, match=r"Expected '0.1' .*around '0'"):
        LayerwiseGradScaler(model, {"0.1": 4.0})


def test_dropped_scaler_leaves_no_boundaries():
    model = nn.Sequential(nn.Linear(4, 4))
    scaler = LayerwiseGradScaler(model, {"0": 2.0})
    copied = copy.deepcopy(model)
    del scaler
    assert not model[0]._forward_hooks
    for one in (model, copied):
        one(torch.ones(2, 4)).sum().backward()
        assert one[0].bias.grad.tolist() == [2.0] * 4
