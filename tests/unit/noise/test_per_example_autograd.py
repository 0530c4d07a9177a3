"""Taps among autograd's other features: each leaves norms and training gradients right."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

from steadygrad.noise.per_example import ExampleNorms
from tests.unit.noise import example_models as ex

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype):
    """Inputs and output gradients differ in dtype; backward may run inside autocast as well."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    batch = torch.randn(ex.BATCH, 40, 16)
    expected, taps = ex.looped(model, batch), ExampleNorms(model)
    with torch.autocast("cpu", dtype):
        value = ex.loss_of(model, batch)
        assert model[0](batch).dtype == dtype
        with taps.recording(ex.BATCH) as found:
            value.backward()
    assert all(value.dtype == torch.float32 for value in found.values())
    # bfloat16 keeps 8 bits: 2**-8 a rounding, some of them in a row.
    ex.assert_same(found, expected, rtol=0.05, atol=0)


def test_autocast_around_backward_alone_costs_no_digits():
    torch.set_default_dtype(torch.float32)
    model, batch = nn.Linear(16, 4), torch.randn(ex.BATCH, 40, 16)
    expected, taps = ex.looped(model, batch), ExampleNorms(model)
    value = ex.loss_of(model, batch)
    with torch.autocast("cpu", torch.bfloat16), taps.recording(ex.BATCH) as found:
        value.backward()
    # float32 sums of 640 terms; bfloat16 would be off by 1e-3.
    ex.assert_same(found, expected, rtol=1e-5, atol=0)


def test_in_place_operations_and_views_after_a_layer():
    class Inplace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x)
            x[:, 0].mul_(3)
            x.view(-1, 6)[::2].relu_()
            x = self.norm(self.two(input=x).chunk(2, dim=1)[0])
            return x.add_(1).flatten(1).prod(1)

    for positions in ex.POSITIONS:
        ex.assert_measures(Inplace(), torch.randn(ex.BATCH, 2 * positions, 6))


def test_inputs_saved_through_hooks():
    """Activation offloading sees the taps' inputs; nothing else keeps them."""
    model, batch = ex.Tiny(), ex.rows_of(14)
    taps, expected, packed = ExampleNorms(model), ex.looped(model, batch), []

    def pack(x: Tensor) -> tuple[Tensor]:
        packed.append(x)
        return (x.clone(),)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x[0]):
        value = ex.loss_of(model, batch)
    with taps.recording(ex.BATCH) as found:
        value.backward()
    ex.assert_same(found, expected)
    assert any(x is batch for x in packed)


@pytest.mark.parametrize("positions", ex.POSITIONS)
def test_gradients_of_gradients(positions: int):
    """A penalty on the input's gradient differentiates the replaced backward pass too."""
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
    plain, inputs = copy.deepcopy(model), torch.randn(ex.BATCH, positions, 6, requires_grad=True)
    taps = ExampleNorms(model)
    assert taps.enabled
    for m in (model, plain):
        (slope,) = torch.autograd.grad(m(inputs).square().sum(), inputs, create_graph=True)
        slope.square().sum().backward()
    ex.assert_same(ex.gradients(model), ex.gradients(plain))


@pytest.mark.parametrize("positions", ex.POSITIONS)
def test_measured_gradients_can_be_differentiated(positions: int):
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5))
    plain, batch = copy.deepcopy(model), torch.randn(ex.BATCH, positions, 6)
    expected, taps = ex.looped(model, batch), ExampleNorms(model)
    with taps.recording(ex.BATCH) as found:
        grads = torch.autograd.grad(ex.loss_of(model, batch), model.parameters(), create_graph=True)
    ex.assert_same(found, expected)
    grads_of_plain = torch.autograd.grad(
        ex.loss_of(plain, batch), plain.parameters(), create_graph=True
    )
    for slopes in (grads, grads_of_plain):
        torch.stack([slope.square().sum() for slope in slopes]).sum().backward()
    ex.assert_same(ex.gradients(model), ex.gradients(plain))


@pytest.mark.parametrize("positions", ex.POSITIONS)
def test_other_hooks_on_the_layer(positions: int):
    """Hooks that change the output, set before or after, keep their part of the graph."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    factor = torch.tensor(3.0, requires_grad=True)
    model[0].register_forward_hook(lambda m, a, out: out * factor)
    model[1].register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
    ex.assert_measures(model, torch.randn(ex.BATCH, positions, 6))


def test_copies_and_saved_models_carry_no_taps():
    model, batch = ex.Tiny(), ex.rows_of(14)
    taps = ExampleNorms(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    clone = copy.deepcopy(model)
    with taps.recording(ex.BATCH) as found:
        ex.loss_of(clone, batch).backward()
    assert found == {}
    assert clone(batch).grad_fn is not None
    assert b"ExampleNorms" not in buffer.getvalue()


def test_function_transforms_pass_through_the_taps():
    model, batch = nn.Sequential(nn.Linear(6, 5)), torch.randn(ex.BATCH, 14, 6)
    ExampleNorms(model)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(parameters: ex.Norms, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x,)).square().sum() / ex.BATCH

    grads = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, batch)
    expected = ex.looped(model, batch)
    ex.assert_same({name: g.square().sum() for name, g in grads.items()}, expected)


def test_switched_off_and_removed():
    model, batch = ex.Tiny(), ex.rows_of(14)
    taps = ExampleNorms(model)
    taps.enabled = False
    assert ex.measured(taps, model, batch) == {}
    assert model.mix(torch.zeros(1, 14, ex.WIDTH)).grad_fn.name() != "_TappedOutputBackward"
    taps.enabled = True
    for handle in taps.handles:
        handle.remove()
    assert model.mix(torch.zeros(1, 14, ex.WIDTH)).grad_fn.name() != "_TappedOutputBackward"
    assert all(not m._forward_hooks for m in model.modules())
    assert all(not p._backward_hooks for p in model.parameters())
