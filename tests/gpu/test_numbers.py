"""Numbers of a CUDA device are the CPU's, those of kernels are multi-tensor calls', in graphs too.

What does not depend on the device the CPU's tests show.
"""

import copy

import pytest
import torch
from adan import Adan
from torch import nn

from steadygrad.optim import LANS, ScaledAdam
from steadygrad.scale import LayerwiseGradScaler
from tests.contracts.problems import (
    assert_same,
    every_type,
    give_gradients,
    parameters,
    run,
    small_parameters_are_coded,  # noqa: F401
    snapshot,
    tensors_of,
)
from tests.contracts.table import OPTIMIZERS, every_optimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Expected a fused kernel for Adan"),
    pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated"),
]


@pytest.fixture
def _triton():
    pytest.importorskip("triton", reason="triton is not installed")


needs_triton = pytest.mark.usefixtures("_triton")


def on_device(dtype=torch.float32):
    """Of several chunks too, with ends that are no whole block, and at odd addresses."""
    draw = torch.Generator().manual_seed(1)
    shapes = (70_001,), (300, 257)
    large = [torch.randn(shape, generator=draw).to(dtype) for shape in shapes]
    found = [p.detach().cuda() for p in (*parameters(dtype), *large)]
    found.append(torch.linspace(-1, 1, 4099, device="cuda").to(dtype)[1:])
    return [p.requires_grad_() for p in found]


def by_kernels(optimizer):
    return all(batch.tables for batch in optimizer._built)


@needs_triton
@every_optimizer
@every_type
def test_all_modes_agree(entry, dtype):
    modes = {"fused": True}, {"fused": True}, {"foreach": True}, {}
    sets = [on_device(dtype) for _ in modes]
    optimizers = [entry(params, **mode) for params, mode in zip(sets, modes, strict=True)]
    for params, optimizer in zip(sets, optimizers, strict=True):
        run(optimizer, params, range(12))
    one, again, _, default = map(snapshot, optimizers, sets)
    # The same bits every time; the default is kernels, which the example of a rule of one's own has
    # not.
    assert_same(one, again)
    assert_same(one, default)
    assert by_kernels(optimizers[0]) is by_kernels(optimizers[3]) is (entry.make is not Adan)
    for (name, a), (_, b) in zip(*map(tensors_of, optimizers[::2]), strict=True):
        if a.dtype is torch.uint8:
            # A sum in another order has another last digit now and then: that turns a code in a
            # million, and more from then on.
            assert (a != b).sum() <= 2 + a.numel() // 10_000, name
            continue
        # Roots and quotients of float32 are within two roundings of the last place there; what
        # cancels, as inner products do, keeps the rounding of its largest term.
        exact = a.dtype is torch.float64 and not name.startswith("model_norm")
        rounding = 1e-11 if exact else 5e-5
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, msg=name)


@pytest.mark.parametrize("name", ["lans", "lamb", "scaled_adam-clipped", "scaled_adam-2022"])
@every_type
def test_calls_are_those_of_the_cpu(name, dtype):
    entry = OPTIMIZERS[name]
    device, host = on_device(dtype), [p.cpu().detach().requires_grad_() for p in on_device(dtype)]
    for params in (device, host):
        run(entry(params, foreach=True), params, range(12))
    for a, b in zip(device, host, strict=True):
        # Sums in another order; a 16-bit weight may round to its neighbour.
        rounding = 2e-2 if dtype in (torch.bfloat16, torch.float16) else 2e-5
        torch.testing.assert_close(a.cpu(), b, rtol=rounding, atol=1e-6)


@needs_triton
@every_optimizer
@every_type
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(entry, dtype, bad):
    params = on_device(dtype)
    optimizer = entry(params, fused=True)
    run(optimizer, params, range(3))
    give_gradients(params, 3)
    params[-2].grad[-1, -1] = bad
    before = snapshot(optimizer, params)
    optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    run(optimizer, params, [4])
    assert optimizer.skipped == 1
    assert not torch.equal(before[0], params[0])


@needs_triton
@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_graphs_take_the_same_steps(entry, dtype):
    """Two graphs with gradients of their own, and plain steps between their replays."""
    rate = torch.tensor(0.01, device="cuda")
    plain, captured = on_device(dtype), on_device(dtype)
    ours = entry(plain, lr=rate, fused=True)
    theirs = entry(captured, lr=rate, fused=True, capturable=True)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(theirs, captured, range(2), none=False)
    torch.cuda.current_stream().wait_stream(stream)
    run(ours, plain, range(2), none=False)
    graphs = []
    for _ in range(2):
        static = [torch.zeros_like(p) for p in captured]
        for p, gradient in zip(captured, static, strict=True):
            p.grad = gradient
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            theirs.step()
        graphs.append((graph, static))
    for step in range(2, 11):
        rate.fill_(0.01 / step)
        give_gradients(plain, step, none=False)
        if step == 6:
            plain[4].grad[0, 0, 0] = torch.nan
        if step % 3 == 2:
            for p, q in zip(captured, plain, strict=True):
                p.grad = q.grad.clone()
            theirs.step()
        else:
            graph, static = graphs[step % 3]
            for gradient, q in zip(static, plain, strict=True):
                gradient.copy_(q.grad)
            graph.replay()
        ours.step()
    assert ours.skipped == theirs.skipped == 1
    assert_same(snapshot(ours, plain), snapshot(theirs, captured))


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_capture_without_capturable_is_refused():
    params = on_device()
    optimizer = LANS(params)
    give_gradients(params, 0)
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="capturable=True"), torch.cuda.graph(graph):
        optimizer.step()


def _free_memory():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


@needs_triton
@pytest.mark.slow
@pytest.mark.skipif(_free_memory() < 30 * 2**30, reason="needs 30 GiB of a device's memory")
@pytest.mark.parametrize("make", [LANS, ScaledAdam])
def test_elements_beyond_two_to_the_31(make):
    size = 2**31 + 5
    p = torch.ones(size, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    p.grad = torch.ones_like(p)
    optimizer = make([p], lr=0.5, master_weights=False, fused=True)
    for _ in range(3):
        optimizer.step()
    # All elements are alike, so they must stay so: the last as the first.
    assert by_kernels(optimizer)
    assert p[0] != 1
    assert p[-1] == p[0]
    assert (p[2**31 - 3 :] == p[0]).all()


def on_both():
    """A model and its data, on the CPU and on the device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 4))
    x, y = torch.randn(24, 16), torch.randn(24, 4)
    return (model, x, y), (copy.deepcopy(model).cuda(), x.cuda(), y.cuda())


@pytest.mark.parametrize("autocast", [False, True])
def test_layer_wise_scales_name_the_layer_that_overflows(autocast):
    found = []
    for model, x, y in on_both():
        optimizer = LANS(model.parameters(), lr=0.01, foreach=True)
        scaler = LayerwiseGradScaler(model, {"0": 2.0**10, "3": 2.0**7}, init_scale=2.0**4)
        # Of the first layer, in the third step.
        wrong = iter([0.0, 0.0, torch.inf, 0.0, 0.0])
        model[0].weight.register_hook(lambda gradient, wrong=wrong: gradient + next(wrong))
        for _ in range(5):
            optimizer.zero_grad()
            with torch.autocast(x.device.type, torch.float16, enabled=autocast):
                loss = (model(x).float() - y).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert scaler.skipped == 1
        found.append((scaler.get_scales(), scaler.get_overflows(), [*model.parameters()]))
    assert found[0][:2] == found[1][:2]
    assert (found[0][0]["0"], found[0][0]["3"]) == (2.0**9, 2.0**7)
    for host, device in zip(found[0][2], found[1][2], strict=True):
        rounding = {"rtol": 2e-2, "atol": 2e-2} if autocast else {"rtol": 1e-4, "atol": 1e-5}
        torch.testing.assert_close(device.cpu(), host, **rounding)
