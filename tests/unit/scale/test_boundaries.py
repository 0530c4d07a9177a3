"""Gradients at a boundary: between neighbours, in float16, measured, and refused ones."""

import pytest
import torch

from steadygrad.optim import LANS
from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.training import (
    SCALES,
    Poison,
    assert_equal,
    loss_on,
    make,
    unscaled_gradients,
)
from tests.unit.test_nests import HIDDEN, KINDS


class Shrink(torch.nn.Linear):
    """Its input's gradient is some 2**12 times smaller than its output's."""

    def forward(self, x):
        return super().forward(x) * 2.0**-12


def shrinking(dtype, scales):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Shrink(8, 8) for _ in range(3))).to(dtype)
    _scaler = LayerwiseGradScaler(model, scales)
    model(torch.ones(4, 8, dtype=dtype)).float().sum().backward()
    return model


def test_between_neighbours_the_plain_gradient_need_not_be_representable():
    scales = {"0": 2.0**30, "1": 2.0**20, "2": 2.0**8}
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
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).half()
    optimizer = LANS(model.parameters(), lr=0.1)
    scaler = LayerwiseGradScaler(model, {"*": 2.0**6}, init_scale=2.0**20)
    loss = model(torch.ones(4, 8).half()).float().sum() * 2.0**-28
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    gradient = model[0].weight.grad
    # 2**-28 is no float16 number; the optimizer's masters are float32, and so is the gradient now.
    assert gradient.dtype == torch.float32
    assert 0 < gradient.abs().max() < 2.0**-24


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_sees_an_overflow_in_a_pass_that_makes_a_graph():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, SCALES)
    # Between two layers, and kept out of both: no weight's gradient shows it.
    Poison(model.a)
    scaler.scale(loss_on(model, 0)).backward(create_graph=True)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.culprits() == [""]
    # And the next step begins anew.
    assert not scaler._table.nonfinite.any()
    for parameter in model.parameters():
        parameter.grad = None  # it holds a graph that holds it


def test_what_a_module_does_to_its_output_later_does_not_reach_the_next():
    class Keeps(torch.nn.Linear):
        def forward(self, x):
            self.last = super().forward(x)
            return self.last

    torch.manual_seed(0)
    first, second = Keeps(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(first, second)
    _scaler = LayerwiseGradScaler(model, {"*": 2.0})
    between = first(torch.ones(2, 4))
    first.last.mul_(3)
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
        ({"0": 2.0**60, "1": 2.0**-60}, 1.0),
    ],
)
def test_scales_whose_product_no_float32_holds(scales, loss_scale):
    """Neither do the gradients overflow nor the numbers that multiply them."""
    linear = torch.nn.Linear

    def gradients(scales, loss_scale):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            linear(4, 4), torch.nn.Sequential(*(linear(4, 4) for _ in range(2)))
        )
        loss = lambda model: model(torch.ones(3, 4)).square().sum()
        return unscaled_gradients(model, scales, loss, init_scale=loss_scale)

    expected = gradients({}, 1.0)
    assert all(gradient.abs().max() > 0 for gradient in expected.values())
    assert_equal(gradients(scales, loss_scale), expected)


def test_batched_gradients_pass():
    """Numbers that stand for a batch of them cannot be read by the host."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    _scaler = LayerwiseGradScaler(model, {"0": 4.0})
    x = torch.ones(3, 4, requires_grad=True)
    out = model(x).sum(0)
    (whole,) = torch.autograd.grad(out, x, torch.eye(2), is_grads_batched=True, retain_graph=True)
    rows = [torch.autograd.grad(out, x, row, retain_graph=True)[0] for row in torch.eye(2)]
    assert torch.equal(whole, torch.stack(rows))
    assert torch.equal(whole[:, 0], model[0].weight)


class Returns(torch.nn.Linear):
    """Returns a nest, and takes one."""

    def __init__(self, make_nest, value_of):
        super().__init__(4, 4)
        self.make_nest, self.value_of = make_nest, value_of

    def forward(self, nest):
        return self.make_nest(super().forward(self.value_of(nest)))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_in_every_kind_of_nest_are_the_plain_ones(kind):
    """Which are those that `LossBalancer.fork` takes, too."""
    make_nest, value_of = KINDS[kind]

    def gradients(scales):
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(Returns(make_nest, value_of) for _ in range(3)))
        nest = make_nest(torch.ones(2, 4, requires_grad=True))
        return unscaled_gradients(model, scales, lambda m: value_of(m(nest)).square().sum())

    assert_equal(gradients({"0": 4.0, "1": 8.0}), gradients({}))


@pytest.mark.parametrize("kind", HIDDEN)
def test_outputs_that_cannot_be_taken_apart_are_refused(kind):
    make_nest, remedy = HIDDEN[kind]
    model = torch.nn.Sequential(Returns(make_nest, lambda tensor: tensor))
    _scaler = LayerwiseGradScaler(model, {"0": 2.0})
    with pytest.raises(ValueError, match=rf"'0'.*{remedy}"):
        model(torch.ones(2, 4))
