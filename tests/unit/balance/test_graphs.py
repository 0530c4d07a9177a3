"""The graphs up to y and on to the losses: nests, heads, hooks, compiled code, derivatives."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.contracts.problems import Watch
from tests.unit.balance.problems import (
    CALLS,
    CLOSE,
    WEIGHTS,
    changed,
    draw,
    go_back,
    gradient_handed_on,
    gradients_of,
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
    unused = draw(4).requires_grad_()
    y = {"audio": (audio * 1, 3), "latent": [latent * 1, unused * 1]}
    options = {"weights": {"a": 1, "b": 2}, "per_batch_item": per_item}
    go_back(LossBalancer(**options), y, nested, call)
    flat = torch.cat([audio.detach().flatten(1), latent.detach()[:, None]], 1)
    expected = gradient_handed_on(LossBalancer(**options), joined, flat)
    got = torch.cat([audio.grad.flatten(1), latent.grad[:, None]], 1)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert unused.grad is None


WRAPPED = {
    "checkpoint": lambda f: partial(checkpoint, f, use_reentrant=False),
    "reentrant": lambda f: partial(checkpoint, f, use_reentrant=True),
    "compiled": lambda f: torch.compile(f, backend="aot_eager"),
}


@pytest.mark.parametrize("call", ["backward", "fork", "fork inside"])
@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_models_that_are_checkpointed_or_compiled(call, wrapped):
    torch._dynamo.reset()
    model, plain, balancer = make_model(), make_model(), LossBalancer(WEIGHTS)
    go_back(LossBalancer(WEIGHTS), plain(draw(4, 5)))
    x = draw(4, 5).requires_grad_()
    if call == "fork inside":
        whole = lambda x: sum(losses_of(balancer.fork(model(x))).values())
        WRAPPED[wrapped](whole)(x).backward()
    else:
        go_back(balancer, WRAPPED[wrapped](model)(x), losses_of, call)
    torch.testing.assert_close(gradients_of(model), gradients_of(plain), **CLOSE)
    # Once, also where a forward pass is run twice.
    assert mass_of(balancer).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("options", [{}, {"retain_graph": True}], ids=["freed", "kept"])
def test_graphs_are_freed_unless_they_are_asked_for(options):
    """Of a loss that stands apart, and of two that share a trunk."""
    trunk = nn.Sequential(nn.Linear(7, 7), nn.Tanh()).double()
    heads = {k: nn.Linear(7, 1).double() for k in ("a", "b")}
    y = draw(4, 7).requires_grad_().exp()
    features = trunk(y)
    losses = {"c": (y**3).mean(), **{k: heads[k](features).mean() for k in heads}}
    LossBalancer({"a": 1, "b": 1, "c": 1}).backward(losses, y, **options)
    if options:
        sum(losses.values()).backward()
        assert trunk[0].weight.grad is not None
        return
    for freed in (losses["c"], features.sum(), y.sum()):
        with pytest.raises(RuntimeError, match="second time"):
            freed.backward()


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


@CALLS
@pytest.mark.parametrize(
    "options",
    [{"monitor": True, "lag": True}, {"balance_grads": False, "per_batch_item": False}],
    ids=["balanced", "weighted"],
)
def test_nothing_is_read_from_the_device(call, options):
    balancer, scale = LossBalancer(WEIGHTS, **options), torch.tensor(8.0)
    with Watch() as watch:
        for _ in range(2):
            gradient_handed_on(balancer, losses_of, draw(4, 7), call, grad_scale=scale)
        balancer.set_weights({"l1": 3.0})
        balancer.end_step()
        assert len(balancer.metrics) >= 9 * 3
    assert watch.waits == []
    with Watch() as watch:
        float(balancer.metrics["norm_l1"])
    assert len(watch.waits) == 1


BESIDE = {
    "upstream": lambda y, z, decoder: 1e-3 * z.square().mean() + y.mean(),
    "a weight": lambda y, z, decoder: F.linear(y, decoder.weight).mean(),
}


@pytest.mark.parametrize("beside", BESIDE.values(), ids=BESIDE)
def test_gradient_that_would_reach_the_model_beside_y(beside):
    torch.manual_seed(0)
    encoder, decoder, critic = (nn.Linear(n, m).double() for n, m in ((5, 7), (7, 7), (7, 1)))
    z = encoder(draw(4, 5))
    y, balancer = decoder(z.tanh()), LossBalancer(WEIGHTS)
    # A critic's own weights are no way into the model.
    losses = changed(adv=lambda y: critic(y).mean())(same_y(y))
    with pytest.raises(InputError, match="'l1'"):
        balancer.backward({**losses, "l1": beside(y, z, decoder)}, y)
    assert encoder.weight.grad is decoder.weight.grad is None
    assert mass_of(balancer).sum() == 0
    balancer.backward(losses, y)
    assert encoder.weight.grad.any()
    assert critic.weight.grad is None


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
    with pytest.raises(InputError, match="copy's derivative"):
        derivative(ys["l1"], x)
    assert not balancer.metrics
