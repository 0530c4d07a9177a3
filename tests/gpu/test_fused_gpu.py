"""Kernels on a CUDA device: the steps of multi-tensor calls, graphs, the same bits."""

import pytest
import torch
from adan import Adan

from steadygrad.optim import LANS, ScaledAdam, codes
from tests.contracts.problems import assert_same, give_gradients, parameters, snapshot, tensors_of
from tests.contracts.table import OPTIMIZERS
from tests.gpu.waiting import no_waiting

pytestmark = pytest.mark.filterwarnings("ignore:Expected a fused kernel for Adan")
every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.fixture(autouse=True)
def _needs_triton_and_small_codes(monkeypatch):
    pytest.importorskip("triton", reason="triton is not installed")
    # As the contracts have it: parameters of tests are small.
    monkeypatch.setattr(codes, "LEAST", 1)
    monkeypatch.setattr(codes, "SHORTEST", 2)


def on_device(dtype=torch.float32, more=()):
    draw = torch.Generator().manual_seed(1)
    large = [torch.randn(shape, generator=draw).to(dtype).requires_grad_() for shape in more]
    return [p.detach().cuda().requires_grad_() for p in (*parameters(dtype), *large)]


def fill(params, step, none=True):
    host = [torch.zeros(p.shape, dtype=p.dtype) for p in params]
    give_gradients(host, step, none)
    for p, q in zip(params, host, strict=True):
        p.grad = None if q.grad is None else q.grad.cuda()


def follow(optimizer, params, steps, none=True):
    for step in steps:
        fill(params, step, none)
        optimizer.step()


def by_kernels(optimizer):
    return all(batch.tables for batch in optimizer._built)


@every_optimizer
@every_type
def test_fused_equals_foreach_but_for_rounding(entry, dtype):
    # Several chunks, an end that is no whole block, and memory at odd addresses.
    more = [(70_001,), (300, 257)]
    ours, theirs = on_device(dtype, more), on_device(dtype, more)
    one, two = entry(ours, fused=True), entry(theirs, foreach=True)
    follow(one, ours, range(12))
    follow(two, theirs, range(12))
    # Moments in eight bits have none, nor has the example of a rule of one's own.
    assert by_kernels(one) or entry.coded or entry.make is Adan
    for (name, a), (_, b) in zip(tensors_of(one), tensors_of(two), strict=True):
        # Roots and quotients of float32 are within two roundings of the last place there; what
        # cancels, as inner products do, keeps the rounding of its largest term.
        exact = a.dtype is torch.float64 and not name.startswith("model_norm")
        rounding = 1e-11 if exact else 5e-5
        torch.testing.assert_close(a, b, rtol=rounding, atol=rounding, msg=name)


@every_optimizer
def test_memory_that_is_not_aligned(entry):
    def shifted():
        base = torch.linspace(-1, 1, 4099, device="cuda")
        return [base[1:].detach().requires_grad_(), base[3:40].detach().clone().requires_grad_()]

    ours, theirs = shifted(), shifted()
    one, two = entry(ours, fused=True), entry(theirs, foreach=True)
    follow(one, ours, range(4), none=False)
    follow(two, theirs, range(4), none=False)
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=5e-5, atol=1e-6)


@every_optimizer
@every_type
def test_the_default_is_multi_tensor_calls(entry, dtype):
    ours, theirs = on_device(dtype), on_device(dtype)
    one, two = entry(ours, foreach=True), entry(theirs)
    follow(one, ours, range(4))
    follow(two, theirs, range(4))
    assert_same(snapshot(one, ours), snapshot(two, theirs))


@every_optimizer
@every_type
def test_a_step_is_the_same_to_the_bit_again(entry, dtype):
    found = []
    for _ in range(2):
        params = on_device(dtype, [(200_003,)])
        optimizer = entry(params, fused=True)
        follow(optimizer, params, range(6))
        found.append(snapshot(optimizer, params))
    assert_same(*found)


@every_optimizer
@every_type
@pytest.mark.parametrize("bad", [float("nan"), float("inf")], ids=str)
def test_a_gradient_that_is_not_finite_changes_nothing(entry, dtype, bad):
    params = on_device(dtype, [(70_001,)])
    optimizer = entry(params, fused=True)
    follow(optimizer, params, range(3))
    fill(params, 3)
    params[-1].grad[-1] = bad
    before = snapshot(optimizer, params)
    optimizer.step()
    assert_same(before, snapshot(optimizer, params))
    assert optimizer.skipped == 1
    follow(optimizer, params, [4])
    assert optimizer.skipped == 1
    assert not torch.equal(before[0], params[0])


@every_optimizer
@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_never_waits_for_the_device(entry, mode):
    params = on_device(torch.bfloat16)
    optimizer = entry(params, lr=torch.tensor(0.01, device="cuda"), **{mode: True})
    follow(optimizer, params, range(2))
    for step in (2, 3):
        fill(params, step)
        optimizer.found_inf = torch.zeros((), device="cuda")
        optimizer.grad_scale = torch.full((), 2.0, device="cuda")
        torch.cuda.synchronize()
        with no_waiting():
            optimizer.step()
    assert optimizer.state[params[0]]["step"] == 4


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
        follow(theirs, captured, range(2), none=False)
    torch.cuda.current_stream().wait_stream(stream)
    follow(ours, plain, range(2), none=False)
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
        fill(plain, step, none=False)
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


@every_optimizer
def test_a_grad_scaler_skips_what_overflows_and_goes_on(entry):
    scaled, plain = on_device(torch.float16), on_device(torch.float16)
    ours, theirs = entry(scaled, fused=True), entry(plain, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=4.0, growth_interval=3)
    for step in range(6):
        fill(plain, step, none=False)
        theirs.step()
        for bad in (True, False) if step in (0, 4) else (False,):
            scaler.scale(torch.zeros((), device="cuda"))
            fill(scaled, step, none=False)
            for p in scaled:
                p.grad.mul_(scaler.get_scale())
            if bad:
                scaled[0].grad[0, 0] = torch.inf
            scaler.step(ours)
            scaler.update()
    assert ours.skipped == 2
    assert_same(scaled, plain)


def _free_memory():
    return torch.cuda.mem_get_info()[0] if torch.cuda.is_available() else 0


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
