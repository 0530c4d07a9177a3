"""Gradients are exact whatever the topology: eager, compiled, checkpointed; the original beside."""

import copy

import pytest
import torch
from torch import nn

from steadygrad.scale import LayerwiseGradScaler
from tests.reference.layerwise import Original
from tests.unit.scale.cases import (
    CASES,
    REFUSED_COMPILED,
    REORDERED,
    data_of,
    loss_of,
    model_of,
)

pytestmark = [
    # The compiler makes one itself, for each autograd function that it traces.
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated"),
    # The first layer's input is data; the original hooks it all the same.
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


def gradients_of(case, scales=None, *, compiled=False):
    """Unscaled gradients, and the loss; without a scaler if there are no scales."""
    torch.compiler.reset()
    model, x = model_of(case), data_of(case)
    scaler = LayerwiseGradScaler(model, scales or {}, init_scale=2.0**5)
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    loss = loss_of(called, x)
    (scaler.scale(loss) if scales else loss).backward()
    if scales:
        scaler.unscale_(torch.optim.SGD(model.parameters()))
    return {name: p.grad for name, p in model.named_parameters()}, loss.detach()


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
    expected, _ = gradients_of_module(model_of("sequential"), x)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(compiled, x)).backward()
        assert torch.equal(model.a.lin.weight.grad, 4 * 2**step * expected["a.lin.weight"])
        scaler.step(optimizer)
        scaler.update()
    assert counter.frame_count == 1


def gradients_of_module(model, x):
    loss = loss_of(model, x)
    loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}, loss


def test_code_that_was_compiled_before_the_scaler_is_noticed():
    torch.compiler.reset()
    model, x = model_of("residual"), data_of("residual")
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    compiled(x)
    scaler = LayerwiseGradScaler(model, {"a": 4.0})
    optimizer = torch.optim.SGD(model.parameters())
    scaler.scale(loss_of(compiled, x)).backward()
    with pytest.raises(ValueError, match="Found 'a' never called"):
        scaler.step(optimizer)


def test_weights_used_behind_their_modules_back_are_noticed():
    class Behind(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(6, 6)

        def forward(self, x):
            return x @ self.inner.weight

    model = Behind()
    scaler = LayerwiseGradScaler(model, {"inner": 4.0})
    loss_of(model, data_of("residual")).backward()
    with pytest.raises(ValueError, match="Found 'inner' never called"):
        scaler.step(torch.optim.SGD(model.parameters()))


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


def test_a_copy_of_the_model_is_not_scaled():
    model, x = model_of("residual"), data_of("residual")
    _scaler = LayerwiseGradScaler(model, {"a": 16.0, "b": 4.0})
    twin = copy.deepcopy(model)
    found, _ = gradients_of_module(twin, x)
    expected, _ = gradients_of_module(model_of("residual"), x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_remove_takes_the_boundaries_off():
    model, x = model_of("residual"), data_of("residual")
    scaler = LayerwiseGradScaler(model, {"a": 16.0})
    scaler.remove()
    found, _ = gradients_of_module(model, x)
    expected, _ = gradients_of_module(model_of("residual"), x)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not model.a._forward_hooks
    assert not model.a._forward_pre_hooks


SCALES = {"a": 4.0, "b": 8.0, "c": 2.0}


class Flat(nn.Module):
    """The same layers without anything inside: the original cannot nest."""

    def __init__(self, last):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))
        if last:
            self.last = nn.Identity()

    def forward(self, x):
        x = self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))
        return self.last(x) if hasattr(self, "last") else x


@pytest.mark.parametrize(("last", "ratio"), [(True, 1.0), (False, 0.5)])
def test_the_original_is_right_only_with_an_identity_at_the_end(last, ratio):
    def ratios(make_scaled):
        torch.manual_seed(0)
        model, x = Flat(last), data_of("sequential")
        plain, _ = gradients_of_module(model, x)
        model.zero_grad()
        make_scaled(model, x)
        return {(p.grad / plain[name]).unique().tolist()[0] for name, p in model.named_parameters()}

    def original(model, x):
        scaler = Original(model, SCALES)
        scaler.scale()
        loss_of(model, x).backward()
        scaler.unscale()

    def ours(model, x):
        scaler = LayerwiseGradScaler(model, SCALES)
        scaler.scale(loss_of(model, x)).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters()))

    assert ratios(ours) == {1.0}
    assert ratios(original) == {ratio}
