"""Hooks and refusals as torch's own optimizers have them: after its OptimizerInfo tests."""

import copy

import pytest
import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from steadygrad._checks import InputError
from tests.contracts.problems import assert_same, give_gradients, parameters, run, snapshot
from tests.contracts.table import OPTIMIZERS, TABLE

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_optimizer_and_mode = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)


def weights(count=2):
    return [torch.full((2, 2), 1.0 + i, requires_grad=True) for i in range(count)]


@every_optimizer_and_mode
def test_hooks_around_a_step_come_in_torchs_order(entry):
    params, seen = parameters(), []
    optimizer = entry(params)

    def hook(name):
        def note(own, args, kwargs):
            assert own is optimizer
            seen.append((name, float(optimizer.state[params[0]]["step"])))

        return note

    handles = [
        optimizer.register_step_post_hook(hook("post")),
        optimizer.register_step_pre_hook(hook("pre")),
        register_optimizer_step_post_hook(hook("post of all")),
        register_optimizer_step_pre_hook(hook("pre of all")),
    ]
    try:
        run(optimizer, params, [0], none=False)
    finally:
        for handle in handles:
            handle.remove()
    expected = [("pre of all", 0.0), ("pre", 0.0), ("post", 1.0), ("post of all", 1.0)]
    assert seen == expected
    run(optimizer, params, [1], none=False)
    assert seen == expected


@every_optimizer
def test_a_hook_before_a_step_may_change_gradients_and_arguments(entry):
    params, others = parameters(), parameters()
    optimizer, plain = entry(params), entry(others)

    def halve(own, args, kwargs):
        for p in params:
            p.grad = None if p.grad is None else p.grad / 2
        return (own, lambda: 7.0), kwargs

    optimizer.register_step_pre_hook(halve)
    give_gradients(params, 0)
    give_gradients(others, 0)
    for p in others:
        p.grad = None if p.grad is None else p.grad / 2
    plain.step()
    assert optimizer.step() == 7.0
    assert_same(snapshot(optimizer, params), snapshot(plain, others))


@every_optimizer_and_mode
def test_a_step_that_raises_calls_no_hook_after_it(entry):
    params, seen = parameters(), []
    optimizer = entry(params)
    optimizer.register_step_post_hook(lambda *args: seen.append("post"))
    run(optimizer, params, range(2), none=False)
    assert seen == ["post"] * 2
    before = snapshot(optimizer, params)

    def fails():
        raise KeyError("the model")

    with pytest.raises(KeyError, match="the model"):
        optimizer.step(fails)
    params[0].grad = params[0].grad.to_sparse()
    with pytest.raises(InputError, match="dense gradients"):
        optimizer.step()
    assert seen == ["post"] * 2
    assert_same(before, snapshot(optimizer, params))


@every_optimizer
def test_hooks_around_saving(entry):
    params, seen = parameters(), []
    optimizer = entry(params)
    optimizer.register_state_dict_pre_hook(lambda own: seen.append("second"))
    optimizer.register_state_dict_pre_hook(lambda own: seen.append("first"), prepend=True)
    optimizer.register_state_dict_post_hook(lambda own, found: {**found, "note": [*seen, "third"]})
    handle = optimizer.register_state_dict_post_hook(
        lambda own, found: found["state"].pop(0) and None, prepend=True
    )
    saved = optimizer.state_dict()
    assert saved["note"] == ["first", "second", "third"]
    assert 0 not in saved["state"]
    handle.remove()
    assert 0 in optimizer.state_dict()["state"]
    assert {*optimizer.state[params[0]]} > {"step"}


@every_optimizer
def test_hooks_around_loading(entry):
    params, others, seen = parameters(), parameters(), []
    optimizer, other = entry(params), entry(others)
    run(optimizer, params, range(3))

    def faster(own, found):
        seen.append("faster")
        # Tensors, as they were saved, and a copy that the hook may change.
        assert all(type(t) is torch.Tensor for t in found["state"][0].values())
        found["param_groups"][0]["lr"] *= 2

    def renamed(own, found):
        seen.append("renamed")
        found = copy.copy(found)
        found["param_groups"] = found.pop("groups")
        return found

    other.register_load_state_dict_pre_hook(faster)
    other.register_load_state_dict_pre_hook(renamed, prepend=True)
    other.register_load_state_dict_post_hook(lambda own: seen.append("done"))
    saved = copy.deepcopy(optimizer.state_dict())
    saved["groups"] = saved.pop("param_groups")
    rate = optimizer.param_groups[0]["lr"]
    other.load_state_dict(saved)
    assert seen == ["renamed", "faster", "done"]
    assert other.param_groups[0]["lr"] == 2 * rate
    assert other.state[others[0]]["step"] == 3
    # The own hook that keeps types is gone again.
    assert len(other._optimizer_load_state_dict_pre_hooks) == 2


@every_optimizer
def test_hooks_are_not_copied(entry):
    params, seen = parameters(), []
    optimizer = entry(params)
    optimizer.register_step_post_hook(lambda *args: seen.append("post"))
    twin = copy.deepcopy(optimizer)
    run(twin, twin.param_groups[0]["params"], range(2))
    assert seen == []
    run(optimizer, params, range(2))
    assert seen == ["post"] * 2


@every_optimizer
def test_zero_grad_forgets_or_zeroes(entry):
    params = parameters()
    optimizer = entry(params)
    give_gradients(params, 0, none=False)
    own = [p.grad for p in params]
    optimizer.zero_grad(set_to_none=False)
    assert all(p.grad is g and not g.any() for p, g in zip(params, own, strict=True))
    optimizer.zero_grad()
    assert all(p.grad is None for p in params)


REFUSED = {
    "one tensor": (lambda a, b: a, {}, TypeError, "iterable of Tensors or dicts"),
    "a set": (lambda a, b: [{"params": {a, b}}], {}, TypeError, "ordered collections"),
    "a dictionary": (lambda a, b: {"params": [a]}, {}, TypeError, "can only optimize Tensors"),
    "nothing": (lambda a, b: [], {}, ValueError, "empty parameter list"),
    "no tensors": (lambda a, b: [a, 3.0], {}, TypeError, "can only optimize Tensors"),
    "no leaf": (lambda a, b: [a * 2], {}, ValueError, "non-leaf"),
    "twice in two groups": (
        lambda a, b: [{"params": a}, {"params": [b, a]}],
        {},
        ValueError,
        "more than one parameter group",
    ),
    "two rates": (
        lambda a, b: [a],
        {"lr": torch.tensor([0.1, 0.2])},
        ValueError,
        r"`lr`.*Found 2 of",
    ),
    "a name missing": (
        lambda a, b: [("a", a), b],
        {},
        ValueError,
        "all optimizer params should be with/without names",
    ),
    "a group without names": (
        lambda a, b: [{"params": [a]}, {"params": [("b", b)]}],
        {},
        ValueError,
        "all optimizer param groups should be with/without names",
    ),
    "a beta of one": (lambda a, b: [a], {"betas": (1.0, 0.0)}, ValueError, "`betas`"),
    "betas in tensors": (
        lambda a, b: [a],
        {"betas": (torch.tensor(0.9), 0.99)},
        ValueError,
        "`betas`",
    ),
    "differentiable": (lambda a, b: [a], {"differentiable": True}, TypeError, "differentiable"),
}


@every_optimizer
@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused(entry, case):
    make, options, kind, message = REFUSED[case]
    a, b = weights()
    with pytest.raises(kind, match=message):
        entry(make(a, b), **options)


@every_optimizer
def test_a_parameter_twice_in_a_group_is_warned_of(entry):
    (a,) = weights(1)
    with pytest.warns(UserWarning, match="duplicate parameters"):
        entry([a, a])
