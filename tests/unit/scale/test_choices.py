"""Which modules patterns choose, and what is refused."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.scale import AutoScale, LayerScale, LayerwiseGradScaler
from steadygrad.scale.layers import automatic_layers
from tests.contracts.problems import hooks_of
from tests.unit.nets import Net
from tests.unit.scale.cases import block, tied
from tests.unit.scale.training import Model


def scales(model, wanted, **options):
    found = LayerwiseGradScaler(model, wanted, **options).get_scales()
    del found[""]
    return found


def blocks():
    return nn.Sequential(nn.Sequential(block(), block()), nn.Sequential(block()))


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ({"*.0.lin": 2.0}, {"0.0.lin": 2.0, "1.0.lin": 2.0}),
        ({"**.lin": 2.0}, {"0.0.lin": 2.0, "0.1.lin": 2.0, "1.0.lin": 2.0}),
        ({"*": 2.0, "1": 8.0}, {"0": 2.0, "1": 8.0}),
        (
            {"[01].0.l?n": 2.0, "1.**": 4.0},
            {"0.0.lin": 2.0, "1": 4.0, "1.0": 4.0, "1.0.lin": 4.0},
        ),
    ],
)
def test_patterns_go_by_parts_of_names(wanted, expected):
    assert scales(blocks(), wanted) == expected


# Models that are only looked at.


def listed():
    """A list of parameters, and modules in one that has no forward."""
    body = nn.Module()
    body.a, body.b = block(), block()
    return Net(None, extra=nn.ParameterList([nn.Parameter(torch.ones(4))]), body=body)


def body():
    return Net(None, wte=nn.Embedding(5, 6), h=nn.ModuleList([block(), block()]))


def language_model():
    """A body, and a head with the weights of its embedding."""
    model = Net(None, body=body(), lm_head=nn.Linear(6, 5, bias=False))
    model.lm_head.weight = model.body.wte.weight
    return model


def with_loss(inner):
    return Net(None, net=inner, loss=nn.MSELoss())


def tower():
    """A module that is a part, and lies in another part as well."""
    model = Net(None, shared=block(), inner=nn.Sequential(block()))
    model.inner.append(model.shared)
    return model


AUTOMATIC = {
    "parts": (Model, ["a", "b.0", "b.1", "head"]),
    "blocks": (blocks, ["0.0", "0.1", "1.0"]),
    "nothing": (tied, []),
    "lists": (listed, ["body.a", "body.b"]),
    "tied": (language_model, ["body.h.0", "body.h.1"]),
    # A module in two places is one part, wherever it lies.
    "two places": (tower, ["shared", "inner.0"]),
    "wrapped": (lambda: with_loss(language_model()), ["net.body.h.0", "net.body.h.1", "loss"]),
    # What would be nothing if it was taken apart stays whole.
    "kept whole": (lambda: with_loss(tied()), ["net", "loss"]),
}


@pytest.mark.parametrize("case", AUTOMATIC)
def test_automatic_layers_are_the_parts_that_a_model_is_made_of(case):
    make, expected = AUTOMATIC[case]
    assert automatic_layers(make()) == expected
    assert list(scales(make(), "auto")) == expected
    # But for those that are given.
    given = AutoScale(layers=tuple(expected[:1]), scale=4.0)
    assert scales(make(), given) == dict.fromkeys(expected[:1], 4.0)


REFUSED = {
    "no match": (Model, {"heads": 2.0}, {}, "'heads'"),
    "tied": (tied, {"up": 2.0}, {}, "'up.weight'.*'up'.*'down.weight'"),
    "tied, both": (tied, {"up": 2.0, "down": 2.0}, {}, "'down.weight'.*'down'"),
    "shared": (tower, {"inner": 2.0}, {}, "'shared.lin.weight'.*'inner'"),
    "shared, chosen": (tower, {"inner": 2.0, "shared": 4.0}, {}, "'inner.1.*'inner' and 'shared'"),
    "zero": (Model, {"a": 0.0}, {}, r"layer_scales\['a'\]"),
    "infinite": (Model, {"a": float("inf")}, {}, r"layer_scales\['a'\]"),
    "text": (Model, {"a": "2"}, {}, r"layer_scales\['a'\]"),
    "fixed": (Model, {"a": LayerScale(-2.0, fixed=True)}, {}, r"layer_scales\['a'\]"),
    "no mapping": (Model, [("a", 2.0)], {}, "layer_scales"),
    "other word": (Model, "automatic", {}, "layer_scales"),
    "no model": (lambda: {"a": 2.0}, Model(), {}, "model"),
    **{
        name: (Model, {"a": 2.0}, {name: wrong}, f"`{name}`")
        for name, wrong in {
            "growth_factor": 0.5,
            "backoff_factor": 1.5,
            "growth_interval": 0,
            "min_scale": 2.0**127,
            "max_scale": -1.0,
            "init_scale": 0.0,
            "process_group": "some",
        }.items()
    },
}


@pytest.mark.parametrize("case", REFUSED)
def test_refuses_arguments_and_touches_no_model(case):
    make, wanted, options, told = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=f"{told}.*Remedy: "):
        LayerwiseGradScaler(model, wanted, **options)
    assert not isinstance(model, nn.Module) or not hooks_of(model)


def test_a_module_has_one_scaler():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)))
    first = LayerwiseGradScaler(model, {"0": 2.0})
    second = LayerwiseGradScaler(model, {"1": 8.0})
    # Nor may another one lie within it or around it.
    around = nn.Sequential(model)
    for whole, place in ((model, "0"), (model, "1.0"), (around, "0")):
        with pytest.raises(InputError, match=f"'{place}'.*remove"):
            LayerwiseGradScaler(whole, {place: 4.0})
    # Others may have a scaler of their own.
    model(torch.ones(2, 4)).sum().backward()
    assert model[1][0].bias.grad.tolist() == [16.0] * 4
    first.remove()
    second.remove()
    assert scales(model, {"*": 4.0}) == {"0": 4.0, "1": 4.0}


@pytest.mark.parametrize("how", ["copied", "removed", "dropped"])
def test_no_boundaries_are_left_behind(how):
    model = nn.Sequential(nn.Linear(4, 4))
    scaler = LayerwiseGradScaler(model, {"0": 16.0})
    copied = copy.deepcopy(model)
    if how == "removed":
        scaler.remove()
    elif how == "dropped":
        del scaler
    for one in [copied] if how == "copied" else [model, copied]:
        one(torch.ones(2, 4)).sum().backward()
        assert one[0].bias.grad.tolist() == [2.0] * 4
    # A copy has hooks that belong to no scaler.
    assert scales(copied, {"*": 4.0}) == {"0": 4.0}
    assert bool(hooks_of(model)) == (how == "copied")
