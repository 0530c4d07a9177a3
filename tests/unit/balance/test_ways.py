"""Ways by which gradients go: odd nests, what goes beside y, what is left out, what is refused."""

import collections
import types
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
    make_model,
    mass_of,
    same_y,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731


class Several(dict):
    """A dict that torch does not know."""


class Named(list):
    """A list that torch does not know."""


class Slot:
    def __init__(self, found):
        self.deep = {"x": [found]}


ODD = {
    "dict": (lambda t: Several(z=t), "dict"),
    "user dict": (lambda t: collections.UserDict(z=t), "dict"),
    "list": (lambda t: Named([t]), "list"),
    "namespace": (lambda t: types.SimpleNamespace(z=t), "vars"),
    "object": (Slot, "vars"),
}


@CALLS
@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("nested", [False, True])
def test_nests_that_cannot_be_looked_into_are_refused(call, kind, nested):
    odd, remedy = ODD[kind]
    source = draw(4, 7).requires_grad_()
    y = {"plain": source * 1, "odd": odd(source * 2)} if nested else odd(source * 2)
    balancer = LossBalancer(WEIGHTS)
    with pytest.raises(InputError, match=rf"with tensors in it, which.*Remedy: `{remedy}\(y\)`"):
        balancer.fork(y) if call == "fork" else balancer.backward({"l1": source.sum()}, y)
    # What carries no gradient may come along: nothing is lost with it.
    kept = odd(source.detach())
    assert balancer.fork({"plain": source * 1, "odd": kept})["l1"]["odd"] is kept


def encoder_and_decoder():
    torch.manual_seed(0)
    return nn.Linear(5, 7).double(), nn.Linear(7, 7).double()


def from_upstream(y, z, decoder):
    return 1e-3 * z.square().mean() + y.mean()


def from_a_weight(y, z, decoder):
    return F.linear(y, decoder.weight).mean()


@pytest.mark.parametrize("beside", [from_upstream, from_a_weight], ids=lambda f: f.__name__)
def test_gradient_that_would_reach_the_model_beside_y(beside):
    encoder, decoder = encoder_and_decoder()
    z = encoder(draw(4, 5))
    y, balancer = decoder(z.tanh()), LossBalancer(WEIGHTS)
    losses = {**losses_of({"l2": y, "adv": y}, TARGET), "l1": beside(y, z, decoder)}
    critic = nn.Linear(7, 1).double()
    losses["adv"] = losses["adv"] + critic(y).mean()
    with pytest.raises(InputError, match=r"'l1' should reach the model through `y`.*`fork\(y\)`"):
        balancer.backward(losses, y)
    assert encoder.weight.grad is decoder.weight.grad is critic.weight.grad is None
    assert mass_of(balancer).sum() == 0
    # The remedy carries both: with a slope of its own beside y, the encoder gets both.
    found = []
    for factor in (0.0, 1e3):
        encoder.zero_grad()
        z = encoder(draw(4, 5))
        ys = balancer.fork(decoder(z.tanh()))
        (losses_of(ys, TARGET)["l2"] + factor * z.square().mean()).backward()
        found.append(encoder.bias.grad.clone())
    torch.testing.assert_close(found[1] - found[0], 1e3 * 2 * z.detach().mean(0) / 7, **CLOSE)


def test_another_output_of_the_same_node_is_beside_y():
    source = draw(4, 14).requires_grad_()
    y, other = (2 * source).split(7, dim=1)
    balancer = LossBalancer({"a": 1, "b": 1})
    losses = {"a": y.sum(), "b": (y * other).sum()}
    with pytest.raises(InputError, match=r"'b' should reach the model through `y` alone"):
        balancer.backward(losses, y)
    assert source.grad is None
    # Both handed in, nothing is lost.
    balancer.backward(losses, [y, other])
    assert (source.grad != 0).all()


def test_losses_of_a_critic_that_learns_are_none_of_that():
    """Its weights are no way into the model, also where nobody asks for their gradient."""
    model, critic = make_model(), nn.Linear(7, 1).double()
    y = model(draw(4, 5))
    losses = {**make(same_y(y)), "adv": critic(y).mean()}
    LossBalancer(WEIGHTS).backward(losses, y)
    assert model[0].weight.grad is not None
    assert critic.weight.grad is None


def test_one_compiled_graph_that_returns_y_and_losses():
    model = make_model()

    def whole(x):
        y = model(x)
        return y, losses_of(same_y(y), TARGET)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        torch._dynamo.reset()
        y, losses = torch.compile(whole, backend="aot_eager")(draw(4, 5))
    with pytest.raises(InputError, match="'l1' should depend on `y`"):
        LossBalancer(WEIGHTS).backward(losses, y)


def test_options_can_be_read_in_a_compiled_graph():
    balancer = LossBalancer(WEIGHTS, total_norm=3.0)
    torch._dynamo.reset()
    scaled = torch.compile(
        lambda x: x * balancer.options.total_norm, backend="eager", fullgraph=True
    )
    assert scaled(torch.ones(())).item() == 3.0


@pytest.mark.parametrize("balance", [True, False])
def test_a_loss_that_is_left_out_is_not_in_the_effective_loss(balance):
    """As a mean over nothing: its value is NaN, and its gradient zero."""
    empty = torch.zeros(4, 7, dtype=torch.bool)
    found = []
    for masked in (True, False):
        y = draw(4, 7).requires_grad_()
        losses = {"a": y.square().mean(), "b": y[empty].mean()}
        if not masked:
            del losses["b"]
        balancer = LossBalancer({"a": 2.0, "b": 1.0}, balance_grads=balance)
        found.append(balancer.backward(losses, y))
    assert torch.isfinite(found[0])
    assert torch.equal(*found)


def test_neither_is_one_without_a_weight():
    y = draw(4, 7).requires_grad_()
    losses = {"a": y.square().mean(), "watched": y.sum() + torch.inf}
    got = LossBalancer({"a": 2.0, "watched": 0.0}).backward(losses, y)
    y = y.detach().requires_grad_()
    assert torch.equal(got, LossBalancer({"a": 2.0}).backward({"a": y.square().mean()}, y))


def test_the_plain_sum_of_values_has_also_those_without_a_slope():
    y = draw(4, 7).requires_grad_()
    losses = {"a": y.sum(), "b": 0 * y.sum() + 5}
    got = LossBalancer({"a": 2.0, "b": 3.0}, balance_grads=False).backward(losses, y)
    torch.testing.assert_close(got, 2 * y.detach().sum() + 15)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        ((torch.float16, torch.float16), torch.float32),
        ((torch.float32, torch.float16), torch.float32),
        ((torch.float32, torch.float64), torch.float64),
    ],
)
@pytest.mark.parametrize("grad_scale", [None, 2.0, torch.tensor(2.0).double()])
def test_the_effective_loss_has_the_widest_type(dtypes, expected, grad_scale):
    y = draw(4, 7).requires_grad_()
    losses = {k: y.abs().mean().to(d) for k, d in zip("ab", dtypes, strict=True)}
    got = LossBalancer({"a": 1, "b": 1}).backward(losses, y, grad_scale=grad_scale)
    assert got.dtype == expected


@CALLS
def test_a_loss_scale_of_zero_leaves_every_loss_out(call):
    """No tensor is read to refuse it."""
    balancer = LossBalancer(WEIGHTS, grad_scale=torch.zeros(()))
    nothing = lambda ys: {k: 0 * v for k, v in make(ys).items()}  # noqa: E731
    got = gradient_handed_on(balancer, nothing, draw(4, 7), call)
    assert torch.equal(got, torch.zeros_like(got))
    assert {balancer.metrics[f"nonfinite_{k}"].item() for k in WEIGHTS} == {1}
    assert mass_of(balancer).sum() == 0


def test_a_loss_scale_that_is_a_parameter_is_not_trained():
    scale = nn.Parameter(torch.tensor(2.0))
    y = draw(4, 7).requires_grad_()
    effective = LossBalancer(WEIGHTS, grad_scale=scale).backward(make(same_y(y)), y)
    assert not effective.requires_grad
    assert scale.grad is None


@pytest.mark.parametrize("name", ["nonfinite", "zero"])
def test_counts_that_were_handed_out_do_not_move(name):
    balancer = LossBalancer(WEIGHTS)
    factor = torch.nan if name == "nonfinite" else 0.0
    bad = lambda ys: {**make(ys), "l2": ys["l2"].sum() * factor}  # noqa: E731
    gradient_handed_on(balancer, bad, draw(4, 7))
    count = balancer.metrics[f"{name}_l2"]
    gradient_handed_on(balancer, bad, draw(4, 7))
    assert count.item() == 1
    assert balancer.metrics[f"{name}_l2"].item() == 2


def test_a_second_derivative_through_a_fork_is_refused():
    x = draw(4, 7).requires_grad_()
    loss = sum(make(LossBalancer(WEIGHTS).fork(x * 1)).values())
    (got,) = torch.autograd.grad(loss, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        got.square().sum().backward()


def derivative(u, x):
    return torch.autograd.grad(u.sum(), x, create_graph=True)[0]


def test_losses_of_derivatives_are_balanced_where_these_are_forked():
    """As in a physics-informed loss: to the bit what `backward` does with both as the output."""
    net = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    x = draw(5, 1).requires_grad_()

    def gradients(call):
        net.zero_grad()
        y = {"u": net(x)}
        y["u_xx"] = derivative(derivative(y["u"], x), x)
        if call == "backward":
            y = {name: tensor * 1 for name, tensor in y.items()}
        balancer = LossBalancer({"pde": 1, "edge": 2})
        ys = balancer.fork(y) if call == "fork" else dict.fromkeys(balancer.weights, y)
        pde = (ys["pde"]["u"] + ys["pde"]["u_xx"]).square().mean()
        losses = {"pde": pde, "edge": ys["edge"]["u"][0].square().sum()}
        sum(losses.values()).backward() if call == "fork" else balancer.backward(losses, y)
        return [p.grad for p in net.parameters() if p.grad is not None]

    for found, expected in zip(gradients("fork"), gradients("backward"), strict=True):
        assert torch.equal(found, expected)


def test_a_derivative_of_a_forks_copy_is_refused_before_anything_is_counted():
    x = draw(5, 1).requires_grad_()
    balancer = LossBalancer(WEIGHTS)
    ys = balancer.fork(x.sin())
    with pytest.raises(InputError, match="copy's derivative"):
        derivative(ys["l1"], x)
    assert not balancer.metrics
