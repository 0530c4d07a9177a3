"""On a CUDA device: the same numbers as on the CPU, and not one wait for the device."""

import copy

import pytest
import torch
from torch import nn

from steadygrad.noise import NoiseScale, SplitBatchNoiseScale
from steadygrad.scale import LayerwiseGradScaler
from tests.gpu.waiting import no_waiting


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    return model, torch.randn(24, 16), torch.randn(24, 4)


def step(noise, model, x, y, scaler=None):
    for a, b in zip(x.split(6), y.split(6), strict=True):
        loss = (model(a) - b).square().sum(-1).mean() / 4
        with noise.microbatch(6):
            (loss if scaler is None else scaler.scale(loss)).backward()
    noise.step()


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
def test_equals_the_cpu(source):
    model, x, y = make()
    twin = copy.deepcopy(model).cuda()
    cpu, gpu = NoiseScale(model, source=source), NoiseScale(twin, source=source)
    for _ in range(5):
        step(cpu, model, x, y)
        step(gpu, twin, x.cuda(), y.cuda())
        model.zero_grad()
        twin.zero_grad()
    expected, got = cpu.estimate(), gpu.estimate()
    # 1e-4: float32 gradients, and noise is a difference of squares.
    assert got.noise_trace.item() == pytest.approx(expected.noise_trace.item(), rel=1e-4)
    assert got.grad_sq_norm.item() == pytest.approx(expected.grad_sq_norm.item(), rel=1e-4)


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
@pytest.mark.parametrize("scaled", [False, True])
def test_training_never_waits(source, scaled):
    model, x, y = make()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8) if scaled else None
    noise = NoiseScale(model, source=source, scaler=scaler)
    step(noise, model, x, y, scaler)  # the first step may set things up
    model.zero_grad()
    with no_waiting():
        step(noise, model, x, y, scaler)
        estimate = noise.estimate()
    assert estimate.measurements.item() == 2


def found_step(noise, model, x, y, scaler=None):
    """Passes that are found, with weights on the device."""
    for a, b in zip(x.split(6), y.split(6), strict=True):
        weight = torch.full((), 0.25, device=x.device)
        noise.samples(6, weight=weight)
        loss = (model(a) - b).square().sum(-1).mean() * weight
        (loss if scaler is None else scaler.scale(loss)).backward()
    noise.step()


@pytest.mark.filterwarnings("ignore:Expected `.grad`")
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("left_over", [False, True])
def test_found_passes_never_wait(scaled, left_over):
    model, x, y = make()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    scaler = LayerwiseGradScaler(model, {"0": 2.0**8}, init_scale=2.0**4) if scaled else None
    noise = NoiseScale(model, scaler=scaler)
    expected = NoiseScale(model, scaler=scaler)
    found_step(noise, model, x, y, scaler)
    model.zero_grad()
    with no_waiting():
        found_step(noise, model, x, y, scaler)
        model.zero_grad()
        if left_over:
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            found_step(noise, model, x, y, scaler)
            model.zero_grad()
    step(expected, model, x, y, scaler)
    assert (noise.altered.item(), noise.estimate().measurements.item()) == (int(left_over), 2)
    # 1e-5: float32 gradients, and noise is a difference of squares.
    got = noise.estimate().noise_trace.item()
    assert got == pytest.approx(expected.estimate().noise_trace.item(), rel=1e-5)


def test_the_preconditioned_metric_never_waits():
    model, x, y = make()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    noise = NoiseScale(model, metric="preconditioned", optimizer=optimizer)
    for _ in range(2):
        step(noise, model, x, y)
        optimizer.step()
        optimizer.zero_grad()
    with no_waiting():
        step(noise, model, x, y)
    assert noise.estimate().measurements.item() == 2


def test_the_split_batch_estimator_equals_the_cpu():
    model, x, y = make()
    twin = copy.deepcopy(model).cuda()
    values = []
    for m, a, b in [(model, x, y), (twin, x.cuda(), y.cuda())]:
        estimator = SplitBatchNoiseScale().to(a.device)
        torch.manual_seed(3)
        loss = (m(a) - b).square().sum(-1)
        values.append(estimator(loss, list(m.parameters()), fill_grad=True).item())
    assert values[1] == pytest.approx(values[0], rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_a_compiled_model_on_the_device():
    model, x, y = make()
    model, x, y = model.cuda(), x.cuda(), y.cuda()
    plain = NoiseScale(model)
    step(plain, model, x, y)
    model.zero_grad()
    compiled = torch.compile(model)
    noise = NoiseScale(compiled)
    step(noise, compiled, x, y)
    got, expected = noise.estimate().noise_trace, plain.estimate().noise_trace
    assert got.item() == pytest.approx(expected.item(), rel=1e-3)
