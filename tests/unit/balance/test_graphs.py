"""The graph between y and the losses: nests, heads, hooks, freed graphs, derivatives."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from steadygrad.balance import graphs
from tests.unit.balance.problems import (
    CALLS,
    CLOSE,
    WEIGHTS,
    changed,
    draw,
    go_back,
    gradient_handed_on,
    losses_of,
    make_model,
    mass_of,
    same_y,
)


@CALLS
@pytest.mark.parametrize("per_item", [True, False])
def test_a_nest_is_balanced_like_its_concatenation(call, per_item):
    def losses(audio, latent, audio_mean):
        return {"a": (audio**2).mean(), "b": 50 * (latent * audio_mean).sum()}

    def nested(ys):
        assert ys["a"]["audio"][1] == 3
        (audio, _), [latent, _] = ys["a"]["audio"], ys["b"]["latent"]
        return losses(audio, latent, ys["b"]["audio"][0].mean((1, 2)))

    def joined(ys):
        return losses(ys["a"][:, :6], ys["b"][:, 6], ys["b"][:, :6].mean(1))

    audio, latent = draw(4, 2, 3).requires_grad_(), draw(4, seed=1).requires_grad_()
    y = {"audio": (audio * 1, 3), "latent": [latent * 1, torch.ones(2)]}
    options = {"weights": {"a": 1, "b": 2}, "per_batch_item": per_item}
    go_back(LossBalancer(**options), y, nested, call)
    flat = torch.cat([audio.detach().flatten(1), latent.detach()[:, None]], 1)
    expected = gradient_handed_on(LossBalancer(**options), joined, flat)
    got = torch.cat([audio.grad.flatten(1), latent.grad[:, None]], 1)
    torch.testing.assert_close(got, expected, **CLOSE)


@CALLS
def test_a_tensor_that_is_there_twice_counts_once(call):
    y = draw(4, 7).requires_grad_()
    losses = lambda ys: {"a": ys["a"]["again"][0].sum(), "b": 3 * ys["b"]["wave"].sum()}
    go_back(LossBalancer({"a": 1, "b": 1}), {"wave": y, "again": [y, 5]}, losses, call)
    # Both point the same way: every item's norm is the total.
    torch.testing.assert_close(y.grad.norm(dim=1), torch.ones(4).double(), rtol=1e-9, atol=0)


@CALLS
def test_an_output_that_no_loss_uses_gets_no_gradient(call):
    used, unused = draw(4, 7).requires_grad_(), draw(4).requires_grad_()
    y = [used * 1, unused * 1]
    go_back(LossBalancer({"a": 1}), y, lambda ys: {"a": (ys["a"][0] ** 2).sum()}, call)
    assert used.grad is not None
    assert unused.grad is None


def test_copies_refuse_to_be_changed_in_place():
    ys = LossBalancer({"a": 1, "b": 1}).fork(draw(4, 7).requires_grad_() * 1)
    with pytest.raises(RuntimeError, match="modified inplace"):
        ys["a"].add_(1)


def trunk_and_heads():
    torch.manual_seed(1)
    trunk = nn.Sequential(nn.Linear(7, 7), nn.Tanh()).double()
    heads = {k: nn.Linear(7, 1).double() for k in ("a", "b")}
    return trunk, heads


def test_a_graph_is_freed_as_soon_as_no_other_loss_needs_it(monkeypatch):
    """First comes a loss that stands apart, then two that share a trunk."""
    kept, grad = [], torch.autograd.grad
    monkeypatch.setattr(
        torch.autograd, "grad", lambda *a, **k: kept.append(k["retain_graph"]) or grad(*a, **k)
    )
    trunk, heads = trunk_and_heads()
    source = draw(4, 7).requires_grad_()
    y = source.exp()
    features = trunk(y)
    losses = {"c": (y**3).mean(), **{k: heads[k](features).mean() for k in heads}}
    LossBalancer({"a": 1, "b": 1, "c": 1}).backward(losses, y)
    assert kept == [False, True, False]
    for freed in (losses["c"], features.sum(), y.sum()):
        with pytest.raises(RuntimeError, match="second time"):
            freed.backward()


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


def test_heads_get_an_ordinary_backward_pass_through_a_fork():
    """Their plain gradient, added to what is there; hooks of DDP and others run once."""
    trunk, heads = trunk_and_heads()
    losses = lambda ys: {k: head(trunk(ys[k])).square().mean() for k, head in heads.items()}
    y = draw(4, 7)
    sum(losses({"a": y, "b": y}).values()).backward()
    parameters = [*trunk.parameters(), *heads["a"].parameters(), *heads["b"].parameters()]
    expected, calls = [p.grad.clone() for p in parameters], []
    for p in parameters:
        p.grad = torch.ones_like(p)
        p.register_post_accumulate_grad_hook(calls.append)
    gradient_handed_on(LossBalancer({"a": 1, "b": 9}), losses, y, "fork")
    for p, e in zip(parameters, expected, strict=True):
        torch.testing.assert_close(p.grad, 1 + e, **CLOSE)
    assert len(calls) == len(parameters)


@CALLS
def test_hooks_of_the_output_see_the_balanced_gradient_alone(call):
    """FSDP2 gathers a model's parameters in such a hook."""
    source, seen = draw(4, 7).requires_grad_(), []
    y = source * 1
    y.retain_grad()
    y.register_hook(lambda g: seen.append(g.clone()))
    go_back(LossBalancer(WEIGHTS), y, losses_of, call)
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
    balancer, scale = LossBalancer(WEIGHTS, **options), torch.tensor(8.0)
    with Reads() as reads:
        for _ in range(2):
            gradient_handed_on(balancer, losses_of, draw(4, 7), call, grad_scale=scale)
        balancer.set_weights({"l1": 3.0})
        balancer.end_step()
        assert len(balancer.metrics) >= 9 * 3
    assert reads.found == []
    with Reads() as reads:
        float(balancer.metrics["norm_l1"])
    assert reads.found == ["_local_scalar_dense"]


def test_one_walk_for_all_outputs_and_one_for_each_loss(monkeypatch):
    """Whatever their number: with a walk for each, hundreds of outputs took seconds."""
    visited, walk = [], graphs._upstream
    monkeypatch.setattr(graphs, "_upstream", lambda *a: visited.append(walk(*a)) or visited[-1])
    source = draw(4, 7).requires_grad_()
    y, x = [], source
    for _ in range(50):
        x = x.tanh()
        y.append(x * 1)
    losses = {k: sum(leaf.abs().mean() * i for leaf in y) for i, k in enumerate("ab", 1)}
    LossBalancer({"a": 1, "b": 1}).backward(losses, y)
    # What is upstream of all outputs: 50 tanh and the source.
    assert len(visited[0]) == 51
    assert len(visited) == 3


def from_upstream(y, z, decoder):
    return 1e-3 * z.square().mean() + y.mean()


def from_a_weight(y, z, decoder):
    return F.linear(y, decoder.weight).mean()


@pytest.mark.parametrize("beside", [from_upstream, from_a_weight], ids=lambda f: f.__name__)
def test_gradient_that_would_reach_the_model_beside_y(beside):
    torch.manual_seed(0)
    encoder, decoder, critic = (nn.Linear(n, m).double() for n, m in ((5, 7), (7, 7), (7, 1)))
    z = encoder(draw(4, 5))
    y, balancer = decoder(z.tanh()), LossBalancer(WEIGHTS)
    losses = {**losses_of({"l2": y, "adv": y}), "l1": beside(y, z, decoder)}
    losses["adv"] = losses["adv"] + critic(y).mean()
    with pytest.raises(InputError, match="'l1'"):
        balancer.backward(losses, y)
    assert encoder.weight.grad is decoder.weight.grad is critic.weight.grad is None
    assert mass_of(balancer).sum() == 0


def test_another_output_of_the_same_node_is_beside_y():
    source = draw(4, 14).requires_grad_()
    y, other = (2 * source).split(7, dim=1)
    balancer = LossBalancer({"a": 1, "b": 1})
    losses = {"a": y.sum(), "b": (y * other).sum()}
    with pytest.raises(InputError, match="'b'"):
        balancer.backward(losses, y)
    assert source.grad is None
    # Both handed in, nothing is lost.
    balancer.backward(losses, [y, other])
    assert (source.grad != 0).all()


def test_losses_of_a_critic_that_learns_are_none_of_that():
    """Its weights are no way into the model, also where nobody asks for their gradient."""
    model, critic = make_model(), nn.Linear(7, 1).double()
    y = model(draw(4, 5))
    LossBalancer(WEIGHTS).backward(changed(adv=lambda y: critic(y).mean())(same_y(y)), y)
    assert model[0].weight.grad is not None
    assert critic.weight.grad is None


def test_a_second_derivative_through_a_fork_is_refused():
    x = draw(4, 7).requires_grad_()
    loss = sum(losses_of(LossBalancer(WEIGHTS).fork(x * 1)).values())
    (got,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        got.square().sum().backward()


def derivative(u, x):
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def test_losses_of_derivatives_are_balanced_where_these_are_forked():
    """As in a physics-informed loss: to the bit what `backward` does with both as the output."""
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = draw(5, 1).requires_grad_()

    def losses(ys):
        pde = (ys["pde"]["u"] + ys["pde"]["u_xx"]).square().mean()
        return {"pde": pde, "edge": ys["edge"]["u"][0].square().sum()}

    def gradients(call):
        net.zero_grad()
        y = {"u": net(x)}
        y["u_xx"] = derivative(derivative(y["u"], x), x)
        if call == "backward":
            y = {name: tensor * 1 for name, tensor in y.items()}
        go_back(LossBalancer({"pde": 1, "edge": 2}), y, losses, call)
        return [p.grad for p in net.parameters() if p.grad is not None]

    for found, expected in zip(gradients("fork"), gradients("backward"), strict=True):
        assert torch.equal(found, expected)


def test_a_derivative_of_a_forks_copy_is_refused_before_anything_is_counted():
    x, balancer = draw(5, 1).requires_grad_(), LossBalancer(WEIGHTS)
    ys = balancer.fork(x.sin())
    with pytest.raises(InputError, match="derivative"):
        derivative(ys["l1"], x)
    assert not balancer.metrics
