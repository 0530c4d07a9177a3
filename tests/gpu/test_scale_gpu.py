"""Layer-wise scales on a CUDA device: exact, the CPU's decisions, and no wait for the device."""

import copy

import pytest
import torch

from steadygrad.optim import LANS
from steadygrad.scale import AutoScale, LayerwiseGradScaler
from tests.gpu.waiting import no_waiting
from tests.unit.scale.cases import CASES, REFUSED_COMPILED, REORDERED, data_of, loss_of, model_of
from tests.unit.scale.training import SCALES, Poison, batch, make

pytestmark = pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")


def gradients_of(case, scales, compiled):
    torch.compiler.reset()
    model, x = model_of(case).cuda(), data_of(case).cuda()
    scaler = LayerwiseGradScaler(model, scales, init_scale=2.0**5)
    called = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
    scaler.scale(loss_of(called, x)).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters()))
    return {name: p.grad for name, p in model.named_parameters()}


# What is refused in compiled code is tried on the CPU.
TRIED = [case for case in CASES if case not in REORDERED | REFUSED_COMPILED]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("case", TRIED)
def test_gradients_are_the_plain_ones(case, compiled):
    plain, scaled = gradients_of(case, {}, compiled), gradients_of(case, CASES[case][1], compiled)
    for name, gradient in plain.items():
        # A library may choose other kernels, which add up in another order.
        atol = 2e-6 * gradient.abs().max().item()
        torch.testing.assert_close(scaled[name], gradient, rtol=0.0, atol=atol, msg=name)


def test_scales_past_float16s_range_stay_finite_in_products():
    """A scale of 2**20 is infinite as a float16: it must not be cast to one."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)).cuda().half()
    scaler = LayerwiseGradScaler(model, {"0": 2.0**20}, init_scale=1.0)
    x = torch.ones(2, 4, device="cuda", dtype=torch.float16)
    scaler.scale(model(x).float().sum() * 2.0**-18).backward()
    scaler.unscale_(torch.optim.SGD(model.parameters(), lr=0.0))
    expected = copy.deepcopy(model).float()
    expected.zero_grad()
    (expected(x.float()).sum() * 2.0**-18).backward()
    for p, q in zip(model[0].parameters(), expected[0].parameters(), strict=True):
        assert q.grad.abs().max() > 0
        # Unscaled into float16's subnormal numbers: the least of them.
        torch.testing.assert_close(p.grad.float(), q.grad, rtol=2e-3, atol=2.0**-24)


def trained(device, steps, poisoned):
    model, _ = make()
    model = model.to(device)
    optimizer = LANS(model.parameters(), lr=0.01, foreach=True)
    scaler = LayerwiseGradScaler(model, SCALES, init_scale=2.0**4)
    poison = Poison(model.b[0])
    for step in range(steps):
        poison.active = step == poisoned
        x, y = (value.to(device) for value in batch(step))
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
    return model, scaler


def test_the_cpus_decisions():
    (host, ours), (device, theirs) = trained("cpu", 5, 2), trained("cuda", 5, 2)
    assert theirs.get_scales() == ours.get_scales()
    assert theirs.get_overflows() == ours.get_overflows()
    assert theirs.get_scales()["b"] == SCALES["b"] / 2
    assert theirs.skipped == 1
    for p, q in zip(host.parameters(), device.parameters(), strict=True):
        torch.testing.assert_close(q.cpu(), p, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["by hand", "auto"])
def test_does_not_wait_for_the_device(how):
    model, _ = make()
    model = model.cuda()
    # With `fused=True` it looks for overflows itself: the scaler does not ask the device.
    optimizer = LANS(model.parameters(), lr=0.01, fused=True)
    scales = SCALES if how == "by hand" else AutoScale()
    scaler = LayerwiseGradScaler(model, scales)
    batches = [tuple(value.cuda() for value in batch(step)) for step in range(8)]

    def step(x, y):
        optimizer.zero_grad()
        scaler.scale((model(x) - y).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    # The first steps look the model over.
    for some in batches[:3]:
        step(*some)
    with no_waiting():
        for some in batches[3:]:
            step(*some)
    assert scaler.skipped == 0
    assert all(p.isfinite().all() for p in model.parameters())


def test_autocast_names_the_layer_that_overflows():
    model, _ = make()
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = LayerwiseGradScaler(model, SCALES, init_scale=2.0**4)
    before = copy.deepcopy(model.state_dict())
    Poison(model.b[0])
    with torch.autocast("cuda", torch.float16):
        x, y = (value.cuda() for value in batch(0))
        loss = (model(x).float() - y).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.culprits() == ["b"]
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
