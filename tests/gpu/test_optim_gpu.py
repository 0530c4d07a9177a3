"""ScaledAdam and LANS on a CUDA device: the same results, and CUDA graphs."""

import copy

import pytest
import torch
from torch import nn

from steadygrad.optim import LANS, ScaledAdam
from tests.golden.trajectories import HERE, Trajectory

MAKERS = {
    "lans": lambda p, **k: LANS(p, lr=1e-2, **k),
    "scaled_adam": lambda p, **k: ScaledAdam(p, clipping_scale=2.0, clipping_update_period=5, **k),
    "stateless7": lambda p, **k: ScaledAdam(p, recipe="stateless7", **k),
}


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.LayerNorm(40), nn.Tanh(), nn.Linear(40, 1))
    return model.to("cuda", dtype)


def fill_gradients(model, step):
    draw = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=draw).to(p)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", sorted(f.stem for f in HERE.glob("scaled_adam*.npz")))
def test_golden_scaled_adam(name, fused):
    golden = Trajectory.read(name)
    values = {k: v.detach().cuda().requires_grad_() for k, v in golden.parameters().items()}
    kwargs = {k: tuple(v) if k == "betas" else v for k, v in golden.config["kwargs"].items()}
    recipe = "zipformer" if "zipformer" in name else "stateless7"
    optimizer = ScaledAdam(values.values(), **kwargs, recipe=recipe, fused=fused)
    # The README's tolerances: exact in float64, float32 elsewhere.
    exact = "float64" in name and recipe == "stateless7"
    assert golden.follow(optimizer, values) < (1e-12 if exact else 2e-5)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_equals_the_cpu(maker, dtype):
    device = network(dtype)
    host = copy.deepcopy(device).cpu()
    optimizers = [maker(device.parameters()), maker(host.parameters())]
    for step in range(12):
        for model, optimizer in zip((device, host), optimizers, strict=True):
            fill_gradients(model, step)
            optimizer.step()
    for a, b in zip(device.parameters(), host.parameters(), strict=True):
        # Sums in another order; a 16-bit weight may round to its neighbour.
        rounding = 2e-5 if dtype is torch.float32 else 2e-2
        torch.testing.assert_close(a.cpu(), b, rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_a_captured_graph_takes_the_same_steps(maker):
    plain, captured = network(), network()
    ours = maker(plain.parameters())
    theirs = maker(captured.parameters(), capturable=True)
    for p in captured.parameters():
        p.grad = torch.zeros_like(p)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            theirs.step()
    torch.cuda.current_stream().wait_stream(stream)
    theirs.load_state_dict(maker(captured.parameters(), capturable=True).state_dict())
    captured.load_state_dict(plain.state_dict())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        theirs.step()
    for step in range(8):
        fill_gradients(plain, step)
        for p, q in zip(plain.parameters(), captured.parameters(), strict=True):
            q.grad.copy_(p.grad)
        ours.step()
        graph.replay()
    for p, q in zip(plain.parameters(), captured.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_without_capturable_is_refused():
    model = network()
    optimizer = LANS(model.parameters())
    fill_gradients(model, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(graph):
        optimizer.step()


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_grad_scaler_skips_and_goes_on(maker):
    model = network()
    optimizer = maker(model.parameters())
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**10)
    for step in range(4):
        optimizer.zero_grad()
        x = torch.randn(8, 6, device="cuda") * (torch.inf if step == 1 else 1.0)
        scaler.scale(model(x).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    # The scaler does not call the optimizer.
    assert optimizer.skipped == 0
    assert all(state["step"] == 3 for state in optimizer.state.values())
    assert all(torch.isfinite(p).all() for p in model.parameters())
