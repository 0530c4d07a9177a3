"""Gradients at a boundary are exact whatever the topology: eager, compiled, float16, exchanged."""

import gc

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from steadygrad.optim import LANS
from steadygrad.scale import LayerwiseGradScaler
from tests.unit.nets import Net
from tests.unit.scale.cases import CASES, REFUSED_COMPILED, REORDERED, data_of, loss_of, model_of
from tests.unit.scale.training import (
    SCALES,
    Shrink,
    assert_equal,
    loss_on,
    make,
    take_step,
    unscaled_gradients,
)
from tests.unit.test_nests import HIDDEN

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


COMPILED = [
    pytest.param(case, True, marks=pytest.mark.slow)
    for case in CASES
    if case not in REFUSED_COMPILED
]


@pytest.mark.parametrize(("case", "compiled"), [*((case, False) for case in CASES), *COMPILED])
def test_gradients_are_the_plain_ones_to_the_bit(case, compiled):
    plain, loss = gradients_of(case, compiled=compiled)
    scaled, same_loss = gradients_of(case, CASES[case][1], compiled=compiled)
    assert torch.equal(loss, same_loss)
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    if case in REORDERED:
        for name, gradient in plain.items():
            # Sums of a few float32 numbers in another order, relative to the tensor's largest.
            atol = 2e-6 * gradient.abs().max().item()
            torch.testing.assert_close(scaled[name], gradient, rtol=0.0, atol=atol, msg=name)
        plain, _ = gradients_of(case, dict.fromkeys(CASES[case][1], 1.0), compiled=compiled)
    assert_equal(scaled, plain)


@pytest.mark.parametrize("case", sorted(REFUSED_COMPILED))
def test_a_changed_argument_is_refused_in_compiled_code(case):
    # torch wraps what a callback raises while it traces.
    with pytest.raises(Exception, match="in place"):
        gradients_of(case, CASES[case][1], compiled=True)


def test_scales_change_without_another_compilation():
    torch.compiler.reset()
    model, x = model_of("sequential"), data_of("sequential")
    scaler = LayerwiseGradScaler(model, {"0": 4.0, "2": 2.0}, growth_interval=1)
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, backend=counter)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    expected, _ = gradients_of("sequential")
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss_of(compiled, x)).backward()
        # Scaled inside, and plain outside.
        assert torch.equal(model[0].lin.weight.grad, 4 * 2**step * expected["0.lin.weight"])
        assert torch.equal(model[1].lin.weight.grad, expected["1.lin.weight"])
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


def layers(count, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(4, 4) for _ in range(count))).to(dtype)


def shrinking(dtype, scales):
    torch.manual_seed(0)
    model = nn.Sequential(*(Shrink(8, 8) for _ in range(3))).to(dtype)
    _scaler = LayerwiseGradScaler(model, scales)
    (model(torch.ones(4, 8, dtype=dtype)).float().sum() * 2.0**-6).backward()
    return model


def test_between_neighbours_the_plain_gradient_need_not_be_representable():
    scales = {"0": 2.0**30, "1": 2.0**20, "2": 2.0**12}
    half, full = shrinking(torch.float16, scales), shrinking(torch.float32, scales)
    for found, expected in zip(half.parameters(), full.parameters(), strict=True):
        error = (found.grad.float() - expected.grad).abs().max()
        # A dozen float16 roundings, 2**-11 each.
        assert error < 0.006 * expected.grad.abs().max()
    # One scale for all, as large as the last layer can bear: nothing arrives.
    single = shrinking(torch.float16, {"**": 1.0})
    assert not single[0].weight.grad.any()


@pytest.mark.parametrize("listen", ["hook", "retain_grad"])
def test_a_listener_between_neighbours_hears_the_plain_gradient(listen):
    def heard(scales):
        model, _ = make()
        _scaler = LayerwiseGradScaler(model, scales)
        kept = []

        def forward_hook(module, args, output):
            kept.append(output)
            output.register_hook(lambda g: None) if listen == "hook" else output.retain_grad()

        model.b[0].register_forward_hook(forward_hook)
        loss_on(model, 0).backward(inputs=[*model.parameters(), *kept])
        return kept[0].grad, model.a.weight.grad

    for found, expected in zip(heard({"b.0": 4.0, "b.1": 8.0}), heard({}), strict=True):
        assert torch.equal(found, expected)


def test_masters_keep_what_float16_could_not():
    model = layers(2, torch.float16)
    optimizer = LANS(model.parameters(), lr=0.1)
    scaler = LayerwiseGradScaler(model, {"*": 2.0**6}, init_scale=2.0**20)
    loss = model(torch.ones(4, 4).half()).float().sum() * 2.0**-28
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradient = model[0].weight.grad
    # 2**-28 is no float16 number; the optimizer's masters are float32, and so is the gradient now.
    assert gradient.dtype == torch.float32
    assert 0 < gradient.abs().max() < 2.0**-24


def test_what_a_module_does_to_its_output_later_does_not_reach_the_next():
    kept = []

    def keeps(net, x):
        kept.append(net.lin(x))
        return kept[0]

    first, second = Net(keeps, lin=nn.Linear(4, 4)), nn.Linear(4, 4)
    _scaler = LayerwiseGradScaler(nn.Sequential(first, second), {"*": 2.0})
    between = first(torch.ones(2, 4))
    kept[0].mul_(3)
    with torch.no_grad():
        expected = second(between)
    assert torch.equal(second(between), expected)


def test_a_backward_pass_on_the_other_side_of_an_update_is_refused():
    model, _ = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    loss = scaler.scale(loss_on(model, 0))
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    scaler.update()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(
    ("scales", "loss_scale"),
    [
        ({"1": 2.0**-80, "1.1": 2.0**-80}, 2.0**100),
        ({"1": 2.0**80, "1.1": 2.0**80}, 2.0**-100),
        ({"1.0": 2.0**60, "1.1": 2.0**-70}, 1.0),
    ],
)
def test_scales_whose_product_no_float32_holds(scales, loss_scale):
    """Neither do the gradients overflow nor the numbers that multiply them."""

    def gradients(scales, loss_scale):
        model = layers(1).append(layers(2))
        loss = lambda model: model(torch.ones(3, 4)).square().sum()
        return unscaled_gradients(model, scales, loss, init_scale=loss_scale)

    expected = gradients({}, 1.0)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    assert_equal(gradients(scales, loss_scale), expected)


@pytest.mark.parametrize("kind", HIDDEN)
def test_outputs_that_cannot_be_taken_apart_are_refused(kind):
    make_nest, remedy = HIDDEN[kind]
    model = nn.Sequential(Net(lambda net, x: make_nest(net.lin(x)), lin=nn.Linear(4, 4)))
    _scaler = LayerwiseGradScaler(model, {"0": 2.0})
    with pytest.raises(ValueError, match=rf"'0'.*{remedy}"):
        model(torch.ones(2, 4))


def exchange(model):
    """All parameters become others, which ids of the old ones may name; gone are the old ones."""
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    gc.collect()


def turn_round(model):
    """Parameters move to another layer: their objects are known and stay alive."""
    first, last = model[0].weight, model[-1].weight
    model[0].weight, model[-1].weight = last, first


@pytest.mark.parametrize("change", [exchange, turn_round], ids=lambda change: change.__name__)
def test_exchanged_parameters_are_unscaled_by_their_layer_s_scale(change):
    """After a first step, in which all parameters were looked up."""

    def gradients(scales):
        model = layers(12)
        scaler = LayerwiseGradScaler(model, scales, process_group=None)
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            take_step(optimizer, scaler, model(torch.ones(4, 4)).square().sum())
            found = {name: p.grad for name, p in model.named_parameters()}
            change(model)
        return found

    assert_equal(gradients({str(i): 2.0 ** (i % 5 + 1) for i in range(12)}), gradients({}))


def test_parameters_of_another_model_carry_the_losss_scale_alone():
    model, other = layers(1), nn.Linear(4, 1)
    scaler = LayerwiseGradScaler(model, {"0": 8.0}, init_scale=4.0)
    optimizer = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.0)
    x = torch.ones(2, 4)
    plain = torch.autograd.grad(other(model[0].forward(x)).sum(), [*other.parameters()])
    for _ in range(2):
        take_step(optimizer, scaler, other(model(x)).sum())
        for parameter, expected in zip(other.parameters(), plain, strict=True):
            assert torch.equal(parameter.grad, expected)
