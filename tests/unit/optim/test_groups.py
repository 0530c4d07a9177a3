"""`param_groups`: options by pattern."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel

from steadygrad._checks import InputError
from steadygrad.optim.groups import param_groups


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.encoder = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
        self.head = nn.Linear(4, 7)
        self.scale = nn.Parameter(torch.ones(()))


NAMES = [name for name, _ in Model().named_parameters()]


def table(groups):
    """Options without the parameters, and the names, of each group."""
    return [
        ({k: v for k, v in g.items() if k != "params"}, [name for name, _ in g["params"]])
        for g in groups
    ]


def options_of(groups, name):
    return next(options for options, names in table(groups) if name in names)


def test_one_group_for_each_set_of_options_in_order():
    model = Model()
    groups = param_groups(model, {"*.bias": {"weight_decay": 0.0}, "*.1.*": {"weight_decay": 0}})
    quiet = [n for n in NAMES if n.endswith("bias") or ".1." in n]
    assert table(groups) == [
        ({}, [n for n in NAMES if n not in quiet]),
        ({"weight_decay": 0.0}, quiet),
    ]
    assert groups[0]["params"][0][1] is model.scale
    assert table(param_groups(Model())) == [({}, NAMES)]
    # As every optimizer of torch takes them.
    optimizer = torch.optim.AdamW(groups, lr=1e-3, weight_decay=0.1)
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    assert optimizer.param_groups[1]["param_names"] == quiet


def test_the_star_crosses_dots_and_case_counts():
    model = nn.ModuleDict({"A": nn.Linear(2, 2), "a": nn.ModuleDict({"b": nn.Linear(2, 2)})})
    groups = param_groups(model, {"a.*": {"x": 1}, "?.weight": {"y": 1}, "[A]*": {"z": 1}})
    assert options_of(groups, "a.b.weight") == {"x": 1}
    assert options_of(groups, "A.weight") == {"y": 1, "z": 1}
    # A name with brackets is a pattern of itself.
    model = nn.Module()
    model.parts = nn.ParameterDict({"a[0]": nn.Parameter(torch.ones(2))})
    (group,) = param_groups(model, {"parts.a[0]": {"weight_decay": 0.5}})
    assert group["weight_decay"] == 0.5


def test_later_patterns_win_and_merge_with_multipliers_of_the_base():
    groups = param_groups(
        Model(),
        {
            "encoder.*": {"lr_mult": 0.5, "wd_mult": 2.0},
            "encoder.1.*": {"lr_mult": 0.25},
            "encoder.2.*": {"lr": 0.5},
            "*.bias": {"wd_mult": 0},
        },
        lr=0.125,
        weight_decay=0.25,
    )
    assert options_of(groups, "embed.weight") == {"lr": 0.125, "weight_decay": 0.25}
    assert options_of(groups, "encoder.0.weight") == {"lr": 0.0625, "weight_decay": 0.5}
    assert options_of(groups, "encoder.0.bias") == {"lr": 0.0625, "weight_decay": 0.0}
    assert options_of(groups, "encoder.1.weight") == {"lr": 0.03125, "weight_decay": 0.5}
    assert options_of(groups, "encoder.2.weight") == {"lr": 0.25, "weight_decay": 0.5}


def test_a_tensor_learning_rate_is_each_groups_own():
    lr = torch.tensor(0.5)
    groups = param_groups(Model(), {"*.bias": {"lr_mult": 2.0}, "head.weight": {"x": 1}}, lr=lr)
    groups[0]["lr"].fill_(9)
    assert [float(g["lr"]) for g in groups] == [9, 1.0, 0.5]
    assert float(lr) == 0.5


def test_tied_parameters_come_once_by_their_first_name():
    model = Model()
    model.head.weight = model.embed.weight
    groups = param_groups(model, {"embed.*": {"x": 1}})
    assert [n for _, names in table(groups) for n in names].count("embed.weight") == 1
    assert options_of(groups, "embed.weight") == {"x": 1}
    with pytest.raises(InputError, match=r"'head\.weight' is tied to 'embed\.weight'"):
        param_groups(model, {"head.weight": {"x": 1}})


def test_frozen_parameters_are_left_out_but_known():
    model = Model()
    model.encoder.requires_grad_(False)
    groups = param_groups(model, {"encoder.*": {"lr": 0.0}})
    assert table(groups) == [({}, ["scale", "embed.weight", "head.weight", "head.bias"])]


def test_a_pattern_that_matches_nothing():
    for pattern, near in (("*.baises", r"\.bias"), ("encodr.0.wieght", r"encoder\.0\.weight")):
        with pytest.raises(InputError, match=near):
            param_groups(Model(), {pattern: {"lr": 1.0}})
        with pytest.warns(UserWarning, match=near):
            groups = param_groups(Model(), {pattern: {"lr": 1.0}}, strict=False)
        assert table(groups) == [({}, NAMES)]


@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda m: (pair for pair in m.named_parameters()), ""),
        (lambda m: torch.compile(DataParallel(m)), "_orig_mod.module."),
        (lambda m: DataParallel(torch.compile(m)), "module._orig_mod."),
    ],
)
def test_named_parameters_and_wrappers_do_not_matter(wrap, prefix):
    options = {"encoder.0.*": {"x": 1}, "head.bias": {"y": 1}}
    want = table(param_groups(Model(), options))
    got = table(param_groups(wrap(Model()), options))
    assert got == [(o, [prefix + n for n in names]) for o, names in want]
    # The whole name is right too.
    with_prefix = {prefix + pattern: some for pattern, some in options.items()}
    assert table(param_groups(wrap(Model()), with_prefix)) == got


def test_a_compiled_part_and_a_module_called_module():
    model = nn.ModuleDict({"module": nn.Linear(2, 2), "tail": torch.compile(nn.Linear(2, 2))})
    groups = param_groups(model, {"module.bias": {"x": 1}, "tail.bias": {"y": 1}})
    assert options_of(groups, "module.bias") == {"x": 1}
    assert options_of(groups, "tail._orig_mod.bias") == {"y": 1}
    alone = nn.ModuleDict({"module": nn.Linear(2, 2)})
    assert options_of(param_groups(alone, {"module.bias": {"x": 1}}), "module.bias") == {"x": 1}


@pytest.mark.parametrize(
    ("model", "options", "found"),
    [
        (torch.zeros(2), None, "Tensor"),
        ([], None, "none among 0"),
        (Model().requires_grad_(False), None, "requires_grad_"),
        (Model(), {"*": {"params": []}}, r"'\*'.*params"),
        (Model(), {"*": {"lr_mult": -1}}, "lr_mult"),
        # A multiplier needs a base.
        (Model(), {"head.*": {"lr_mult": 2.0}}, r"lr.*lr_mult.*'head\.weight'"),
        (Model(), {"head.*": {"wd_mult": 2.0}}, r"weight_decay.*wd_mult.*'head\.weight'"),
    ],
)
def test_what_cannot_be_grouped_is_refused(model, options, found):
    with pytest.raises(InputError, match=found):
        param_groups(model, options)
