"""Gradients at a boundary: between neighbours, in float16, measured, and refused ones."""

import pytest
import torch

from steadygrad.optim import LANS
from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.topologies import Record
from tests.unit.scale.training import SCALES, Poison, loss_on, make, train_step
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


def test_measures_exponents_on_demand():
    model, optimizer = make()
    scaler = LayerwiseGradScaler(model, {"a": 1.0, "b": 4.0})
    assert scaler.measured is None
    scaler.measure()
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.float16):
        loss = loss_on(model, 0)
    scaler.scale(loss).backward()
    raw = [p.grad.clone() for p in model.b.parameters()]
    scaler.step(optimizer)
    scaler.update()
    found = scaler.measured
    assert found.scales.tolist() == [1.0, 1.0, 4.0]
    assert found.weights.sum(1).tolist() == [12, 25, 60]
    # The loss's: b's input and output outside, a's output and the data, which needs no gradient.
    assert found.activations.sum(1).tolist() == [90, 30, 60]
    exponents = torch.cat([torch.frexp(g.flatten()).exponent - 1 for g in raw])
    for exponent in exponents.unique().tolist():
        expected = (exponents == exponent).sum()
        assert found.weights[2, exponent + 149 + 1] == expected
    scaler.measure(False)
    train_step(model, optimizer, scaler, 1)
    assert scaler.measured is found


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

    def gradients(scales, loss_scale):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            torch.nn.Linear(4, 4), torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(2)))
        )
        scaler = LayerwiseGradScaler(model, scales, init_scale=loss_scale)
        scaler.scale(model(torch.ones(3, 4)).square().sum()).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters()))
        return [p.grad for p in model.parameters()]

    for found, expected in zip(gradients(scales, loss_scale), gradients({}, 1.0), strict=True):
        assert expected.abs().max() > 0
        assert torch.equal(found, expected)


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
        scaler = LayerwiseGradScaler(model, scales)
        nest = make_nest(torch.ones(2, 4, requires_grad=True))
        scaler.scale(value_of(model(nest)).square().sum()).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters()))
        return [parameter.grad for parameter in model.parameters()]

    for found, expected in zip(gradients({"0": 4.0, "1": 8.0}), gradients({}), strict=True):
        assert torch.equal(found, expected)


def test_gradients_in_packed_sequences_are_the_plain_ones():
    def gradients(scales):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"embed": torch.nn.Linear(4, 4), "rnn": torch.nn.LSTM(4, 3)})
        scaler = LayerwiseGradScaler(model, scales)
        x = torch.nn.utils.rnn.pack_sequence([torch.ones(3, 4), torch.ones(2, 4)])
        x = x._replace(data=model["embed"](x.data))
        out, _ = model["rnn"](torch.nn.utils.rnn.PackedSequence(*x))
        scaler.scale(out.data.square().sum()).backward()
        scaler.unscale_(torch.optim.SGD(model.parameters()))
        return [parameter.grad for parameter in model.parameters()]

    for found, expected in zip(gradients({"rnn": 8.0}), gradients({}), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", HIDDEN)
def test_outputs_that_cannot_be_taken_apart_are_refused(kind):
    make_nest, remedy = HIDDEN[kind]
    model = torch.nn.Sequential(Returns(make_nest, lambda tensor: tensor))
    _scaler = LayerwiseGradScaler(model, {"0": 2.0})
    with pytest.raises(ValueError, match=rf"an output of '0' to be .*{remedy}"):
        model(torch.ones(2, 4))


def test_a_tensor_of_a_data_class_that_is_changed_in_place_is_handed_back():
    class Doubles(torch.nn.Module):
        def forward(self, record):
            record.value.mul_(2)

    def outcome(scales):
        torch.manual_seed(0)
        model = torch.nn.ModuleDict({"first": torch.nn.Linear(4, 4), "doubles": Doubles()})
        _scaler = LayerwiseGradScaler(model, scales)
        record = Record(model["first"](torch.ones(2, 4)))
        model["doubles"](record)
        record.value.square().sum().backward()
        return record.value.detach(), model["first"].weight.grad

    for found, expected in zip(outcome({"doubles": 4.0}), outcome({}), strict=True):
        assert torch.equal(found, expected)
