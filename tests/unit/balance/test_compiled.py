"""Models, heads and forks that are compiled, checkpointed or under autocast."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._functorch import config as functorch
from torch.utils.checkpoint import checkpoint

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from steadygrad.balance.graphs import eager
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


@pytest.fixture(autouse=True)
def quiet_compiler():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        yield


def plain_gradients(*seeds):
    """The model's gradients after steps without any of this."""
    model, balancer = make_model(), LossBalancer(WEIGHTS)
    for seed in seeds or [0]:
        go_back(balancer, model(draw(4, 5, seed=seed)))
    return gradients_of(model)


def make_head():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(7, 7), nn.Tanh(), nn.Linear(7, 2)).double()


@CALLS
def test_checkpointed_models(call):
    model = make_model()
    y = checkpoint(model, draw(4, 5).requires_grad_(), use_reentrant=call == "fork")
    go_back(LossBalancer(WEIGHTS), y, losses_of, call)
    torch.testing.assert_close(gradients_of(model), plain_gradients(), **CLOSE)


# torch's own limit: a reentrant graph can only be walked by a plain backward, which fork has.
@pytest.mark.parametrize(("call", "reentrant"), [("backward", False), ("fork", True)])
def test_checkpointed_heads(call, reentrant):
    head = make_head()
    again = changed(adv=lambda y: checkpoint(head, y, use_reentrant=reentrant).mean())
    got = gradient_handed_on(LossBalancer(WEIGHTS), again, draw(4, 7), call)
    plain = changed(adv=lambda y: head(y).mean())
    expected = gradient_handed_on(LossBalancer(WEIGHTS), plain, draw(4, 7))
    torch.testing.assert_close(got, expected, **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_fork_inside_of_a_checkpoint_balances_once(reentrant):
    balancer, model = LossBalancer(WEIGHTS), make_model()

    def region(x):
        return sum(losses_of(balancer.fork(model(x))).values())

    checkpoint(region, draw(4, 5).requires_grad_(), use_reentrant=reentrant).backward()
    assert mass_of(balancer).tolist() == [1.0, 1.0, 1.0]
    torch.testing.assert_close(gradients_of(model), plain_gradients(), **CLOSE)


@CALLS
def test_compiled_models_and_losses(call):
    model = torch.compile(make_model(), backend="aot_eager")
    # `backward` differentiates each loss by itself, and those of one compiled graph share it.
    losses = torch.compile(losses_of, backend="aot_eager") if call == "fork" else losses_of
    go_back(LossBalancer(WEIGHTS), model(draw(4, 5)), losses, call)
    torch.testing.assert_close(gradients_of(model), plain_gradients(), **CLOSE)


@pytest.mark.parametrize("donated", [True, False])
def test_losses_that_share_a_compiled_head(donated):
    """A compiled backward pass writes over what it kept, unless it is told not to."""
    with functorch.patch(donated_buffer=donated):
        head = make_head()
        compiled = torch.compile(head, backend="aot_eager")
        # It ran an ordinary backward pass before.
        compiled(draw(4, 7).requires_grad_()).mean().backward()
        balancer, source = LossBalancer({"a": 1, "b": 1}), draw(4, 7).requires_grad_()
        y = source * 1
        shared = lambda h, ys: {"a": h(ys)[:, 0].mean(), "b": (3 * h(ys)[:, 1]).mean()}
        out = compiled(y)
        losses = shared(lambda _: out, y)
        if donated:
            with pytest.raises(RuntimeError, match="donated_buffer"):
                balancer.backward(losses, y)
            assert source.grad is None
            assert mass_of(balancer).sum() == 0
            # The remedy: each loss's own copy through the head.
            go_back(balancer, y, lambda ys: {k: shared(compiled, ys[k])[k] for k in ys}, "fork")
        else:
            balancer.backward(losses, y)
    plain = lambda ys: {k: shared(head, ys[k])[k] for k in ys}
    expected = gradient_handed_on(LossBalancer({"a": 1, "b": 1}), plain, draw(4, 7))
    torch.testing.assert_close(source.grad, expected, **CLOSE)


def test_a_compiled_forward_pass_with_a_fork_in_it():
    model, balancer = make_model(), LossBalancer(WEIGHTS)
    whole = torch.compile(
        lambda x: sum(losses_of(balancer.fork(model(x))).values()), backend="aot_eager"
    )
    for seed in range(3):
        whole(draw(4, 5, seed=seed)).backward()
    torch.testing.assert_close(gradients_of(model), plain_gradients(0, 1, 2), **CLOSE)


def test_one_compiled_graph_that_returns_y_and_losses():
    model = make_model()

    def whole(x):
        y = model(x)
        return y, losses_of(same_y(y))

    y, losses = torch.compile(whole, backend="aot_eager")(draw(4, 5))
    with pytest.raises(InputError, match="'l1'"):
        LossBalancer(WEIGHTS).backward(losses, y)


def test_options_can_be_read_in_a_compiled_graph():
    balancer = LossBalancer(WEIGHTS, total_norm=3.0)
    scaled = torch.compile(
        lambda x: x * balancer.options.total_norm, backend="eager", fullgraph=True
    )
    assert scaled(torch.ones(())).item() == 3.0


def test_what_runs_eagerly_is_in_no_compiled_graph():
    seen, graphs = [], []

    @eager
    def aside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    whole = torch.compile(lambda x: 2 * aside(3 * x), backend=backend)
    for _ in range(2):
        assert whole(torch.ones(())).item() == 8
    assert seen == [False, False]
    # One graph before and one after, with a multiplication each.
    assert len(graphs) == 2
    assert aside(torch.ones(())).item() == 2


def test_an_aggregator_computes_in_the_type_it_is_given():
    """In a step under autocast, too: its products would have 8 bits there."""
    seen = []

    def weigh(products):
        seen.append(torch.is_autocast_enabled("cpu"))
        return products.sum(0)

    y = draw(4, 7).requires_grad_()
    balancer = LossBalancer(WEIGHTS, combine=SimpleNamespace(gramian_weighting=weigh))
    with torch.autocast("cpu", torch.bfloat16):
        balancer.backward(losses_of(same_y(y)), y)
    assert seen == [False]
