"""Gradients are exact whatever the topology: eager, compiled, checkpointed."""

import pytest
import torch

from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.cases import CASES, REFUSED_COMPILED, REORDERED, data_of, loss_of, model_of
from tests.unit.scale.training import unscaled_gradients

# The compiler makes one itself, for each autograd function that it traces.
pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")


def gradients_of(case, scales=None, *, compiled=False):
    """Unscaled gradients, and the loss; without a scaler if there are no scales."""
    torch.compiler.reset()
    model, losses = model_of(case), []

    def loss(model):
        called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        losses.append(loss_of(called, data_of(case)))
        return losses[0]

    if scales:
        return unscaled_gradients(model, scales, loss, init_scale=2.0**5), losses[0].detach()
    loss(model).backward()
    return {name: p.grad for name, p in model.named_parameters()}, losses[0].detach()


def assert_same(found, expected, *, exact):
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.abs().max() > 0, name
        # Sums of a few float32 numbers in another order, relative to the tensor's largest.
        atol = 0.0 if exact else 2e-6 * gradient.abs().max().item()
        torch.testing.assert_close(found[name], gradient, rtol=0.0, atol=atol, msg=name)


@pytest.mark.parametrize("case", CASES)
def test_eager_gradients_are_the_plain_ones_to_the_bit(case):
    plain, loss = gradients_of(case)
    scaled, same_loss = gradients_of(case, CASES[case][1])
    assert torch.equal(loss, same_loss)
    assert_same(scaled, plain, exact=case not in REORDERED)
    ones, _ = gradients_of(case, dict.fromkeys(CASES[case][1], 1.0))
    assert_same(scaled, ones, exact=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case not in REFUSED_COMPILED])
def test_compiled_gradients_are_the_plain_ones_to_the_bit(case):
    plain, loss = gradients_of(case, compiled=True)
    scaled, same_loss = gradients_of(case, CASES[case][1], compiled=True)
    assert torch.equal(loss, same_loss)
    assert_same(scaled, plain, exact=case not in REORDERED)


@pytest.mark.parametrize("case", sorted(REFUSED_COMPILED))
def test_a_changed_argument_is_refused_in_compiled_code(case):
    # torch wraps what a callback raises while it traces.
    with pytest.raises(Exception, match="in place"):
        gradients_of(case, CASES[case][1], compiled=True)


def test_inside_the_gradients_are_scaled_and_outside_they_are_not():
    model, x = model_of("residual"), data_of("residual")
    _scaler = LayerwiseGradScaler(model, {"a": 16.0})
    loss_of(model, x.requires_grad_()).backward()
    plain, y = model_of("residual"), data_of("residual").requires_grad_()
    loss_of(plain, y).backward()
    assert torch.equal(model.a.lin.weight.grad, 16 * plain.a.lin.weight.grad)
    assert torch.equal(model.b.lin.weight.grad, plain.b.lin.weight.grad)
    assert torch.equal(x.grad, y.grad)


def test_scales_change_without_another_compilation():
    torch.compiler.reset()
    model, x = model_of("sequential"), data_of("sequential")
    scaler = LayerwiseGradScaler(model, {"a": 4.0, "c": 2.0}, growth_interval=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected, _ = gradients_of("sequential")
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(compiled, x)).backward()
        assert torch.equal(model.a.lin.weight.grad, 4 * 2**step * expected["a.lin.weight"])
        scaler.step(optimizer)
        scaler.update()
    assert counter.frame_count == 1


def test_code_that_was_compiled_before_the_scaler_is_noticed():
    torch.compiler.reset()
    model, x = model_of("residual"), data_of("residual")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x)
    scaler = LayerwiseGradScaler(model, {"a": 4.0})
    optimizer = torch.optim.SGD(model.parameters())
    scaler.scale(loss_of(compiled, x)).backward()
    with pytest.raises(ValueError, match="'a' never called"):
        scaler.step(optimizer)


def test_a_layer_that_took_no_part_may_have_zeros():
    model, x = model_of("residual"), data_of("residual")
    scaler = LayerwiseGradScaler(model, {"a": 4.0})
    model.a.forward = None
    model.a.lin.weight.grad = torch.zeros(6, 6)
    loss_of(lambda y: model.out(model.b(y)), x).backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.b.lin.weight.detach().clone()
    scaler.step(optimizer)
    assert not torch.equal(model.b.lin.weight, before)
