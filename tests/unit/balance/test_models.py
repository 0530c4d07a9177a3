"""Models and heads that are compiled, checkpointed or under autocast."""

import warnings
from types import SimpleNamespace

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from steadygrad import LossBalancer
from steadygrad.balance.graphs import eager
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradients_of,
    losses_of,
    make_model,
    mass_of,
    run,
    same_y,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
CLOSE = {"rtol": 1e-11, "atol": 1e-14}
TARGET = draw(4, 7, seed=1)


def step(balancer, model, x, call):
    run(balancer, model(x), TARGET, call)
    return gradients_of(model)


@CALLS
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_models(call, reentrant):
    model = make_model()
    again = lambda x: checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)  # noqa: E731
    run(LossBalancer(WEIGHTS), again(draw(4, 5)), TARGET, call)
    expected = step(LossBalancer(WEIGHTS), make_model(), draw(4, 5), call)
    torch.testing.assert_close(gradients_of(model), expected, **CLOSE)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_fork_inside_of_a_checkpoint_balances_once(reentrant):
    balancer, model = LossBalancer(WEIGHTS), make_model()

    def region(x):
        return sum(losses_of(balancer.fork(model(x)), TARGET).values())

    checkpoint(region, draw(4, 5).requires_grad_(), use_reentrant=reentrant).backward()
    assert mass_of(balancer).tolist() == [1.0, 1.0, 1.0]
    expected = step(LossBalancer(WEIGHTS), make_model(), draw(4, 5), "fork")
    torch.testing.assert_close(gradients_of(model), expected, **CLOSE)


@CALLS
def test_compiled_models_and_heads(call):
    expected = [step(LossBalancer(WEIGHTS), make_model(), draw(4, 5), call)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        model = torch.compile(make_model(), backend="aot_eager")
        losses = torch.compile(losses_of, backend="aot_eager")
        balancer, y = LossBalancer(WEIGHTS), model(draw(4, 5))
        if call == "fork":
            sum(losses(balancer.fork(y), TARGET).values()).backward()
        else:
            separate = {k: losses({k: y}, TARGET)[k] for k in WEIGHTS}
            balancer.backward(separate, y)
    torch.testing.assert_close([gradients_of(model)], expected, **CLOSE)


def test_a_compiled_forward_pass_with_a_fork_in_it():
    model, balancer = make_model(), LossBalancer(WEIGHTS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        whole = torch.compile(
            lambda x: sum(losses_of(balancer.fork(model(x)), TARGET).values()), backend="aot_eager"
        )
        for seed in range(3):
            whole(draw(4, 5, seed=seed)).backward()
    twin, plain = make_model(), LossBalancer(WEIGHTS)
    for seed in range(3):
        expected = step(plain, twin, draw(4, 5, seed=seed), "fork")
    torch.testing.assert_close(gradients_of(model), expected, **CLOSE)


def test_autocast():
    model = make_model(torch.float32)
    x, target = draw(4, 5, dtype=torch.float32), TARGET.float()
    grads = []
    for enabled in (False, True):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            y = model(x)
            balancer = LossBalancer(WEIGHTS)
            balancer.backward(losses_of(same_y(y), target), y)
        assert y.dtype == (torch.bfloat16 if enabled else torch.float32)
        grads.append(gradients_of(model))
    # bfloat16 has 8 bits, of which the outputs' differences to the target lose some.
    torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=0.03 * grads[0].abs().max().item())


def test_an_aggregator_computes_in_the_type_it_is_given():
    """In a step under autocast, too: its products would have 8 bits there."""
    aggregator = SimpleNamespace(gramian_weighting=lambda p: (p.float() @ p.float()).sum(0))
    found = []
    for enabled in (False, True):
        balancer, y = LossBalancer(WEIGHTS, combine=aggregator), draw(4, 7).float()
        source = y.requires_grad_()
        losses = losses_of(dict.fromkeys(WEIGHTS, source), TARGET.float())
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            balancer.backward(losses, source)
        found.append(source.grad)
    assert torch.equal(*found)


def test_what_runs_eagerly_is_in_no_compiled_graph():
    seen, graphs = [], []

    @eager
    def aside(x):
        seen.append(torch.compiler.is_compiling())
        return x + 1

    def backend(graph, _):
        graphs.append([node.target for node in graph.graph.nodes])
        return graph.forward

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own
        whole = torch.compile(lambda x: 2 * aside(3 * x), backend=backend)
        for _ in range(2):
            assert whole(torch.ones(())).item() == 8
    assert seen == [False, False]
    # One graph before and one after, with a multiplication each.
    assert len(graphs) == 2
    assert aside(torch.ones(())).item() == 2
