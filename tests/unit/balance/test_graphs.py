"""Graphs of every kind: nests, shared trunks, freed graphs, hooks, and no wait for a device."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
    run,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
TARGET = draw(4, 7, seed=1)


def outputs(seed=0):
    """Leaves of two shapes, with something in between that is no output."""
    return draw(4, 2, 3, seed=seed).requires_grad_(), draw(4, seed=seed + 1).requires_grad_()


@CALLS
def test_a_nest_is_balanced_like_its_concatenation(call):
    def nested(balancer, audio, latent):
        y = {"audio": (audio * 1, 3), "latent": [latent * 1, torch.ones(2)]}
        ys = balancer.fork(y) if call == "fork" else dict.fromkeys(balancer.weights, y)
        losses = {
            "a": (ys["a"]["audio"][0] ** 2).mean(),
            "b": 50 * ((ys["b"]["latent"][0] * ys["b"]["audio"][0].mean((1, 2))).sum()),
        }
        assert ys["a"]["audio"][1] == 3
        if call == "fork":
            sum(losses.values()).backward()
        else:
            balancer.backward(losses, y)
        return torch.cat([audio.grad.flatten(1), latent.grad[:, None]], 1)

    def joined(ys):
        audio, latent = ys["a"][:, :6], ys["b"][:, 6]
        return {
            "a": (audio**2).mean(),
            "b": 50 * (latent * ys["b"][:, :6].mean(1)).sum(),
        }

    for per_item in (True, False):
        audio, latent = outputs()
        got = nested(LossBalancer({"a": 1, "b": 2}, per_batch_item=per_item), audio, latent)
        flat = torch.cat([audio.detach().flatten(1), latent.detach()[:, None]], 1)
        balancer = LossBalancer({"a": 1, "b": 2}, per_batch_item=per_item)
        torch.testing.assert_close(got, gradient_handed_on(balancer, joined, flat), **CLOSE)


@CALLS
def test_a_tensor_that_is_there_twice_counts_once(call):
    y = draw(4, 7).requires_grad_()
    balancer = LossBalancer({"a": 1, "b": 1})
    nest = {"wave": y, "again": [y, 5]}
    ys = balancer.fork(nest) if call == "fork" else dict.fromkeys(balancer.weights, nest)
    losses = {"a": ys["a"]["again"][0].sum(), "b": 3 * ys["b"]["wave"].sum()}
    assert ys["a"]["again"][1] == 5
    if call == "fork":
        sum(losses.values()).backward()
    else:
        balancer.backward(losses, nest)
    # Both point the same way: every item's norm is the total.
    torch.testing.assert_close(y.grad.norm(dim=1), torch.ones(4).double(), rtol=1e-9, atol=0)


@CALLS
def test_an_output_that_no_loss_uses_gets_no_gradient(call):
    used, unused = outputs()
    balancer = LossBalancer({"a": 1})
    y = [used * 1, unused * 1]
    if call == "fork":
        (balancer.fork(y)["a"][0] ** 2).sum().backward()
    else:
        balancer.backward({"a": (y[0] ** 2).sum()}, y)
    assert used.grad is not None
    assert unused.grad is None


def test_a_loss_may_use_the_copy_several_times():
    twice = lambda ys: {"a": (ys["a"] * ys["a"].detach()).sum() + ys["a"].exp().sum()}  # noqa: E731
    got = [
        gradient_handed_on(LossBalancer({"a": 1}), twice, draw(4, 7), c)
        for c in ("backward", "fork")
    ]
    torch.testing.assert_close(*got, **CLOSE)


def test_copies_refuse_to_be_changed_in_place():
    ys = LossBalancer({"a": 1, "b": 1}).fork(draw(4, 7).requires_grad_() * 1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        ys["a"].add_(1)
    assert torch.equal(ys["b"], draw(4, 7))


def trunk_and_heads():
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(7, 7), nn.Tanh()).double()
    heads = {k: nn.Linear(7, 1).double() for k in ("a", "b")}
    return trunk, heads


def test_only_shared_graphs_are_kept_and_the_last_is_freed():
    """Seen by what each backward pass may still do afterwards."""
    trunk, heads = trunk_and_heads()
    y = draw(4, 7).requires_grad_() * 1
    features = trunk(y)
    apart = (y**3).mean()
    losses = {"a": heads["a"](features).mean(), "b": heads["b"](features).square().mean()}
    LossBalancer({"a": 1, "b": 1, "c": 1}).backward({**losses, "c": apart}, y)
    for loss in (apart, features.sum()):
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()


def test_a_graph_that_no_other_loss_needs_is_freed_at_once(monkeypatch):
    """First comes a loss that stands apart, then two that share a trunk."""
    kept, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a, **k: kept.append(k["retain_graph"]) or grad(*a, **k)
    )
    trunk, heads = trunk_and_heads()
    y = draw(4, 7).requires_grad_() * 1
    features = trunk(y)
    losses = {"c": (y**3).mean(), **{k: heads[k](features).mean() for k in heads}}
    LossBalancer({"a": 1, "b": 1, "c": 1}).backward(losses, y)
    assert kept == [False, True, False]


def test_graphs_are_kept_on_request():
    trunk, heads = trunk_and_heads()
    source = draw(4, 7).requires_grad_()
    y = source.exp()
    losses = {k: head(trunk(y)).mean() for k, head in heads.items()}
    LossBalancer({"a": 1, "b": 1}).backward(losses, y, retain_graph=True)
    once = source.grad.clone()
    sum(losses.values()).backward()
    assert trunk[0].weight.grad is not None
    assert not torch.equal(once, source.grad)


def test_a_shared_trunk_gets_the_plain_gradient():
    trunk, heads = trunk_and_heads()
    make = lambda ys: {k: head(trunk(ys[k])).square().mean() for k, head in heads.items()}  # noqa: E731
    y = draw(4, 7)
    sum(make({"a": y, "b": y}).values()).backward()
    parameters = [*trunk.parameters(), *heads["a"].parameters(), *heads["b"].parameters()]
    expected = [p.grad.clone() for p in parameters]
    for p in parameters:
        p.grad = torch.ones_like(p)
    gradient_handed_on(LossBalancer({"a": 1, "b": 9}), make, y, "fork")
    for p, e in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, 1 + e, **CLOSE)


def test_heads_see_their_hooks_once():
    """Hooks of DDP and others on parameters run as in an ordinary backward pass."""
    trunk, heads = trunk_and_heads()
    calls = []
    for name, p in trunk.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, n=name: calls.append(n))
    make = lambda ys: {k: head(trunk(ys[k])).mean() for k, head in heads.items()}  # noqa: E731
    gradient_handed_on(LossBalancer({"a": 1, "b": 1}), make, draw(4, 7), "fork")
    assert sorted(calls) == ["0.bias", "0.weight"]


@CALLS
def test_hooks_of_the_output_see_the_balanced_gradient_alone(call):
    """FSDP2 gathers a model's parameters in such a hook."""
    source, seen = draw(4, 7).requires_grad_(), []
    y = source * 1
    y.retain_grad()
    y.register_hook(lambda g: seen.append(g.clone()))
    run(LossBalancer(WEIGHTS), y, TARGET, call)
    assert len(seen) == 1
    assert torch.equal(seen[0], source.grad)
    assert torch.equal(y.grad, source.grad)


class Reads(TorchDispatchMode):
    """Counts what would make the host wait for a device."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "item"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@CALLS
@pytest.mark.parametrize(
    "options",
    [{}, {"monitor": True, "lag": True}, {"balance_grads": False, "per_batch_item": False}],
    ids=["default", "monitor", "weighted"],
)
def test_nothing_is_read_from_the_device(call, options):
    balancer = LossBalancer(WEIGHTS, **options)
    scale = torch.tensor(8.0)
    with Reads() as reads:
        for _ in range(2):
            gradient_handed_on(
                balancer, lambda ys: losses_of(ys, TARGET), draw(4, 7), call, grad_scale=scale
            )
        balancer.set_weights({"l1": 3.0})
        assert len(balancer.metrics) >= 9 * 3
    assert reads.found == []
    with Reads() as reads:
        float(balancer.metrics["norm_l1"])
    assert reads.found == ["_local_scalar_dense"]
