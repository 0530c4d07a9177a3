"""No step of training waits for a CUDA device, as far as torch notices."""

import contextlib
import warnings

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad.noise import NoiseScale
from steadygrad.optim import LANS
from steadygrad.scale import AutoScale, LayerwiseGradScaler
from steadygrad.watch import GradientWatch
from tests.contracts.problems import give_gradients, parameters
from tests.contracts.table import every_optimizer


@contextlib.contextmanager
def no_waiting():
    """Lets what waits for the device fail."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    return model.cuda(), torch.randn(24, 16).cuda(), torch.randn(24, 4).cuda()


@pytest.mark.filterwarnings("ignore:Expected a fused kernel for Adan")
@every_optimizer
@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_optimizers(entry, mode):
    params = [p.detach().cuda().requires_grad_() for p in parameters(torch.bfloat16)]
    optimizer = entry(params, lr=torch.tensor(0.01, device="cuda"), **{mode: True})
    for step in range(4):
        give_gradients(params, step)
        optimizer.found_inf = torch.zeros((), device="cuda")
        optimizer.grad_scale = torch.full((), 2.0, device="cuda")
        torch.cuda.synchronize()
        # The first steps make tables and compile kernels.
        with no_waiting() if step > 1 else contextlib.nullcontext():
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


def noise_step(noise, model, x, y, scaler=None, found=False):
    """Micro-batches that are told of, or passes that are found, with weights on the device."""
    for a, b in zip(x.split(6), y.split(6), strict=True):
        weight = torch.full((), 0.25, device=x.device)
        loss = (model(a) - b).square().sum(-1).mean() * weight
        if found:
            noise.samples(6, weight=weight)
        with contextlib.nullcontext() if found else noise.microbatch(6):
            (loss if scaler is None else scaler.scale(loss)).backward()
    noise.step()


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_scale(source, scaled):
    model, x, y = make()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8) if scaled else None
    noise = NoiseScale(model, source=source, scaler=scaler)
    noise_step(noise, model, x, y, scaler)  # the first step may set things up
    model.zero_grad()
    with no_waiting():
        noise_step(noise, model, x, y, scaler)
        estimate = noise.estimate()
    assert estimate.measurements.item() == 2


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_scale_of_passes_that_are_found(scaled):
    model, x, y = make()
    scaler = LayerwiseGradScaler(model, {"0": 2.0**8}, init_scale=2.0**4) if scaled else None
    noise = NoiseScale(model, scaler=scaler)
    noise_step(noise, model, x, y, scaler, found=True)
    model.zero_grad()
    with no_waiting():
        noise_step(noise, model, x, y, scaler, found=True)
        model.zero_grad()
        # What somebody left in `.grad` is noticed without a look at it.
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        noise_step(noise, model, x, y, scaler, found=True)
    assert (noise.altered.item(), noise.estimate().measurements.item()) == (1, 2)


def test_the_noise_scale_in_the_preconditioned_metric():
    model, x, y = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    for _ in range(2):
        noise_step(noise, model, x, y)
        optimizer.step()
        optimizer.zero_grad()
    with no_waiting():
        noise_step(noise, model, x, y)
    assert noise.estimate().measurements.item() == 2


@pytest.mark.parametrize("call", ["backward", "fork"])
def test_the_balancer(call):
    model, x, target = make()
    scaler = torch.amp.GradScaler("cuda")
    balancer = LossBalancer({"l1": 1.0, "l2": 2.0}, monitor=True)
    factor = scaler.scale(torch.ones((), device="cuda"))

    def step(**options):
        y = model(x)
        if call == "fork":
            ys = balancer.fork(y, grad_scale=scaler, **options)
        else:
            ys = {"l1": y, "l2": y}
        losses = {
            "l1": factor * (ys["l1"] - target).abs().mean(),
            "l2": factor * (ys["l2"] - target).square().mean(),
        }
        if call == "fork":
            sum(losses.values()).backward()
        else:
            balancer.backward(losses, y, grad_scale=scaler, **options)

    step()
    torch.cuda.synchronize()
    with no_waiting():
        step(accumulation_steps=2)
        balancer.set_weights({"l1": 2.0})
        metrics = balancer.metrics
    assert metrics["scale_l1"].item() > 0


@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")
@pytest.mark.parametrize("scales", [{"0": 2.0**10, "3": 2.0**7}, AutoScale()], ids=str)
def test_layer_wise_scales(scales):
    model, x, y = make()
    # With `fused=True` it looks for overflows itself: the scaler does not ask the device.
    optimizer = LANS(model.parameters(), lr=0.01, fused=True)
    scaler = LayerwiseGradScaler(model, scales)
    for step in range(8):
        # The first steps look the model over.
        with no_waiting() if step > 2 else contextlib.nullcontext():
            optimizer.zero_grad()
            scaler.scale((model(x) - y).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert scaler.skipped == 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_watch():
    model, x, y = make()
    watch = GradientWatch(model)
    for step in range(4):
        with no_waiting() if step else contextlib.nullcontext():
            (model(x) - y).square().mean().backward()
            model.zero_grad()
    assert (watch.report(), watch.batches) == (None, 4)
