"""On a CUDA device: the CPU's numbers, and not one wait for the device."""

import copy

import pytest
import torch
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.gpu.waiting import no_waiting
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradients_of,
    losses_of,
    make_model,
    same_y,
)


def step(balancer, model, x, target, call, factor=1.0, **options):
    y = model(x)
    if call == "fork":
        (factor * sum(losses_of(balancer.fork(y, **options), target).values())).backward()
    else:
        losses = {k: factor * v for k, v in losses_of(same_y(y), target).items()}
        balancer.backward(losses, y, **options)


@pytest.mark.parametrize("call", ["backward", "fork"])
@pytest.mark.parametrize("options", [{}, {"per_batch_item": False, "monitor": True}])
def test_equals_the_cpu(call, options):
    cpu, x, target = make_model(), draw(6, 5), draw(6, 7, seed=1)
    gpu = copy.deepcopy(cpu).cuda()
    # Not moved by hand: a balancer goes where its gradients are.
    balancers = LossBalancer(WEIGHTS, **options), LossBalancer(WEIGHTS, **options)
    for _ in range(3):
        step(balancers[0], cpu, x, target, call)
        step(balancers[1], gpu, x.cuda(), target.cuda(), call)
    # float64 sums in another order.
    torch.testing.assert_close(gradients_of(gpu).cpu(), gradients_of(cpu), rtol=1e-9, atol=1e-12)
    for key, value in balancers[0].state_dict().items():
        torch.testing.assert_close(balancers[1].state_dict()[key].cpu(), value)


@pytest.mark.parametrize("call", ["backward", "fork"])
def test_nothing_waits_for_the_device(call):
    model, x, target = make_model(torch.float32).cuda(), draw(6, 5).float(), draw(6, 7).float()
    x, target = x.cuda(), target.cuda()
    scaler = GradScaler("cuda")
    balancer = LossBalancer(WEIGHTS, monitor=True)
    factor = scaler.scale(torch.ones((), device="cuda"))
    step(balancer, model, x, target, call, factor, grad_scale=scaler)
    torch.cuda.synchronize()
    with no_waiting():
        step(balancer, model, x, target, call, factor, grad_scale=scaler, accumulation_steps=2)
        balancer.set_weights({"l1": 2.0})
        metrics = balancer.metrics
    assert metrics["scale_l1"].item() > 0


@pytest.mark.parametrize("call", ["backward", "fork"])
def test_float16_gradients_are_scaled_in_float32(call):
    """A float16 tensor times a float32 scale on the device must not make the scale float16."""
    source = torch.ones(4, 7, device="cuda", dtype=torch.float16, requires_grad=True)
    y = source * 1
    balancer = LossBalancer({"a": 1, "b": 1}, total_norm=10.0)
    ys = balancer.fork(y) if call == "fork" else {"a": y, "b": y}
    losses = {"a": (ys["a"] * 2.0**-20).sum(), "b": (ys["b"] * 2.0**-3).sum()}
    sum(losses.values()).backward() if call == "fork" else balancer.backward(losses, y)
    norms = source.grad.float().norm(dim=1).cpu()
    # 1e-3: float16 has 11 bits.
    torch.testing.assert_close(norms, torch.full((4,), 10.0), rtol=1e-3, atol=0)
