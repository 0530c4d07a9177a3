"""Several tools in one loop, with loss scales: what the same loop gives without them."""

import pytest
import torch
from torch import nn

from steadygrad.balance import LossBalancer
from steadygrad.noise import NoiseScale
from steadygrad.optim import LANS, ScaledAdam
from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.training import SCALES, Model, batch

TOOLS = ["noise", "balancer", "layerwise", "ScaledAdam", "LANS"]
STEPS, MICRO, SAMPLES = 5, 3, 6


class Loop:
    """A loop with some of the tools: micro-batches, two losses, and a loss scale or none."""

    def __init__(self, tools, scaled, order="scaled"):
        torch.manual_seed(0)
        self.model, self.order = Model(), order
        self.optimizers = [*self.make_optimizers(tools)]
        self.scaler = self.make_scaler("layerwise" in tools) if scaled else None
        self.noise = self.balancer = None
        if "noise" in tools:
            self.noise = NoiseScale(self.model, samples=SAMPLES, scaler=self.scaler)
        if "balancer" in tools:
            options = {"grad_scale": self.scaler, "accumulation_steps": MICRO}
            self.balancer = LossBalancer({"square": 1.0, "absolute": 2.0}, **options)
        for step in range(STEPS):
            self.step(step)

    def make_optimizers(self, tools):
        parameters = list(self.model.parameters())
        chosen = [tool for tool in tools if tool in ("ScaledAdam", "LANS")]
        for i, tool in enumerate(chosen):
            mine = parameters[i :: len(chosen)]
            yield LANS(mine, lr=0.01) if tool == "LANS" else ScaledAdam(mine, lr=0.01)
        if not chosen:
            yield torch.optim.SGD(parameters, lr=0.1)

    def make_scaler(self, layerwise):
        options = {"init_scale": 2.0**4, "growth_interval": 2}
        if layerwise:
            return LayerwiseGradScaler(self.model, SCALES, **options)
        return torch.amp.GradScaler("cpu", **options)

    def step(self, step):
        for micro in range(MICRO):
            x, y = batch(MICRO * step + micro, SAMPLES)
            out = self.model(x)
            distance = out - y
            losses = {"square": distance.square().mean(), "absolute": distance.abs().mean()}
            self.backward({name: loss / MICRO for name, loss in losses.items()}, out)
        if self.order == "unscaled" and self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        if self.noise is not None:
            by_layer = isinstance(self.scaler, LayerwiseGradScaler)
            known = self.order == "scaled" or by_layer
            self.noise.step(grad_scale=None if known else 1.0)
        for optimizer in self.optimizers:
            optimizer.step() if self.scaler is None else self.scaler.step(optimizer)
            optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.update()

    def backward(self, losses, out):
        if self.scaler is not None:
            losses = {name: self.scaler.scale(loss) for name, loss in losses.items()}
        if self.balancer is None:
            sum(losses.values()).backward()
        else:
            self.balancer.backward(losses, out)

    def results(self):
        """Everything that a loop leaves behind: weights, measurements, shares."""
        found = {name: p.detach() for name, p in self.model.named_parameters()}
        if self.noise is not None:
            found["measurements"] = self.noise.state_dict()["ring"][:STEPS]
            found["left out"] = torch.stack([self.noise.skipped, self.noise.altered])
        if self.balancer is not None:
            found |= self.balancer.metrics
        return found


@pytest.mark.parametrize("order", ["scaled", "unscaled"])
@pytest.mark.parametrize(
    "tools",
    [TOOLS, ["noise", "balancer"], ["balancer", "layerwise", "LANS"]],
    ids="-".join,
)
def test_tools_together_do_what_they_do_without_loss_scales(tools, order):
    # To the bit: powers of two scale float32 without rounding.
    found = Loop(tools, scaled=True, order=order).results()
    expected = Loop(tools, scaled=False).results()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.isfinite(value).all(), name
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("unscaled", [False, True])
def test_an_overflow_inside_a_layer_is_left_out(unscaled):
    """Its boundary keeps it from the gradients: none of them shows it."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LayerwiseGradScaler(model, {"b.1": 2.0**7, "b": 2.0**3})
    noise = NoiseScale(model, samples=SAMPLES, scaler=scaler)
    bad = False

    def overflow(module, args):
        if bad:
            args[0].register_hook(lambda gradient: gradient + torch.inf)

    model.b[1].register_forward_pre_hook(overflow)  # behind the scaler's: inside the layer
    for step in range(3):
        for micro in range(2):
            x, y = batch(2 * step + micro, SAMPLES)
            bad = (step, micro) == (1, 0)
            scaler.scale(nn.functional.mse_loss(model(x), y) / 2).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters())
        if unscaled:
            scaler.unscale_(optimizer)
        noise.step()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    ring = noise.state_dict()["ring"][:3]
    assert torch.isfinite(ring).flatten(1).all(1).tolist() == [True, False, True]
    assert (scaler.skipped.item(), noise.altered.item()) == (1, 0)
