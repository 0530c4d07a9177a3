"""Kernels for accelerators take the steps of the formulas: by Triton's interpreter, on a CPU."""

import pytest
import torch

from steadygrad import kernels
from steadygrad.optim import LANS, ScaledAdam, device_job
from tests.contracts.problems import (
    Watch,
    assert_rounded_alike,
    assert_same,
    give_gradients,
    parameters,
    run,
    snapshot,
    tensors_of,
)
from tests.contracts.table import OPTIMIZERS
from tests.rounding import assert_alike

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy warns where the interpreter divides by zero or overflows; what comes of it is not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LANS_LAUNCHES = ["square_sums", "lans_directions", "lans_apply"]


@pytest.fixture
def small_chunks(monkeypatch):
    """Chunks so small that the largest of these tensors have two."""
    monkeypatch.setattr(device_job.DeviceJob.__init__, "__defaults__", (16,))


def job_of(optimizer):
    assert optimizer._device_steps is not None
    return optimizer._device_steps._job


def mixed(none=True):
    """All types in two groups, some of them frozen, some without gradients at times."""
    groups = [parameters(dtype)[:5:2] + parameters(dtype)[1:2] for dtype in TYPES]
    params = [p for group in groups for p in group]
    params[2].requires_grad_(False)
    return params


def groups_of(params):
    # Options of their own, and types that are split between the groups.
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.004, "betas": (0.8, 0.95)}]


def fill(params, step):
    give_gradients(params, step)
    params[2].grad = None


@every_optimizer
@pytest.mark.usefixtures("small_chunks")
def test_a_model_of_all_types(entry):
    ours, theirs = mixed(), mixed()
    one, two = entry(groups_of(ours), fused=True), entry(groups_of(theirs), foreach=True)
    for step in range(6):
        for params, optimizer in ((ours, one), (theirs, two)):
            fill(params, step)
            if step == 3:
                params[0].grad[1, 1] = torch.inf
            if step == 4:
                params[4].data[0, 0] = 0.75  # written from outside: a master must follow
            optimizer.step()
    assert job_of(one).table.slots > len(ours)
    assert one.skipped == two.skipped == 1
    assert_rounded_alike(one, two)
    for p in ours:
        if "master_weight" in one.state[p]:
            assert torch.equal(p.detach(), one.state[p]["master_weight"].to(p.dtype))


@every_optimizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_one_type_without_masters(entry, dtype):
    """In float64 to its own rounding; 16 bits rounded once a step."""
    ours, theirs = parameters(dtype), parameters(dtype)
    one = entry(ours, fused=True, master_weights=False)
    two = entry(theirs, foreach=True, master_weights=False)
    run(one, ours, range(4))
    run(two, theirs, range(4))
    if dtype is torch.float64:
        assert_rounded_alike(one, two)
        return
    # The state follows weights that may have been rounded to another neighbour.
    assert_alike((("weight", p) for p in ours), (("weight", p) for p in theirs))


@pytest.mark.parametrize("recipe", ["zipformer", "stateless7"])
def test_a_large_gradient_is_clipped(recipe):
    """By its threshold, which acts on the update in one recipe, on the sizes only in the other."""
    ours, theirs = parameters()[:3], parameters()[:3]
    options = {"recipe": recipe, "clipping_scale": 2.0, "clipping_update_period": 4}
    one = ScaledAdam(ours, fused=True, **options)
    two = ScaledAdam(theirs, foreach=True, **options)
    for step in range(8):
        for params, optimizer in ((ours, one), (theirs, two)):
            give_gradients(params, step, none=False)
            for p in params:
                p.grad.mul_(30 if step in (5, 7) else 1)
            optimizer.step()
    assert one.state[ours[0]]["num_clipped"] == 2
    assert_rounded_alike(one, two)


def test_launches_do_not_grow_with_the_model(interpreter):
    few, many = parameters()[:2], [p for _ in range(3) for p in parameters()]
    for params in (few, many):
        optimizer = LANS([{"params": params[:1]}, {"params": params[1:], "lr": 0.1}], fused=True)
        run(optimizer, params, [0])  # compiles
        interpreter.clear()
        run(optimizer, params, [1])
        assert interpreter == LANS_LAUNCHES


@pytest.mark.parametrize(
    ("scale", "between"), [(None, ["learn_each"]), (2.0, ["totals", "clip_and_learn"])]
)
def test_launches_of_scaled_adam(interpreter, scale, between):
    params = parameters()
    optimizer = ScaledAdam(params, clipping_scale=scale, fused=True)
    run(optimizer, params, [0])
    interpreter.clear()
    run(optimizer, params, [1])
    assert interpreter == ["scaled_adam_sums", *between, "scaled_adam_update"]


@every_optimizer
def test_no_wait_for_a_tensor_that_is_read(entry):
    """A tensor learning rate, and what a gradient scaler has left, are read in the kernels."""
    params, others = parameters(), parameters()
    rate = torch.tensor(0.01)
    optimizer, plain = entry(params, lr=rate, fused=True), entry(others, foreach=True)
    for step in range(3):
        rate.fill_(0.01 / (1 + step))
        plain.param_groups[0]["lr"] = float(rate)
        give_gradients(params, step, none=False)
        give_gradients(others, step, none=False)
        optimizer.found_inf, optimizer.grad_scale = torch.zeros(()), torch.tensor(4.0)
        for p in params:
            p.grad.mul_(4)
        with Watch() as watch:
            optimizer.step()
        assert watch.waits == []
        plain.step()
    assert_rounded_alike(optimizer, plain)


@every_optimizer
def test_a_bad_step_changes_nothing(entry):
    params = parameters(torch.bfloat16)[:5]
    optimizer = entry(params, fused=True)
    for bad in ("nan", "found_inf"):
        run(optimizer, params, [0])
        give_gradients(params, 3)
        if bad == "nan":
            params[4].grad[0, 1, 0] = torch.nan
        else:
            optimizer.found_inf = torch.ones(())
        before = snapshot(optimizer, params)
        optimizer.step()
        assert_same(before, snapshot(optimizer, params))
        optimizer.found_inf = None
    assert optimizer.skipped == 2
    run(optimizer, params, [4])
    assert optimizer.skipped == 2
    assert optimizer.state[params[0]]["step"] == 3
    assert not torch.equal(before[0], params[0])


@every_optimizer
def test_finite_gradients_of_any_size_leave_all_finite(entry):
    params = parameters()[:2]
    optimizer = entry(params, fused=True)
    for size in (1.0, 1e-30, 1.0, 4e18, 1.0, 3e38, 1.0):
        for p in params:
            p.grad = p.detach() / 2 * size
        optimizer.step()
    assert optimizer.state[params[0]]["step"] >= 5
    assert all(torch.isfinite(p).all() for p in params)
    assert all(
        torch.isfinite(t).all() for n, t in tensors_of(optimizer) if n != "model_norm_threshold"
    )


@every_optimizer
@pytest.mark.usefixtures("small_chunks")
def test_sums_that_leave_for_other_shards(entry, interpreter):
    """The same steps where sums of tensors go out between the kernels and come back."""
    ours, theirs = parameters(torch.bfloat16), parameters(torch.bfloat16)
    one, two = entry(ours, fused=True), entry(theirs, fused=True)
    run(one, ours, [0])
    run(two, theirs, [0])
    job_of(one).sharded = True
    calls = []
    one._sums_over = lambda params: lambda columns: calls.append(len(params)) or columns
    for step in (1, 3, 4):
        for params, optimizer in ((ours, one), (theirs, two)):
            give_gradients(params, step)
            if step == 3:
                params[0].grad[0, 0] = torch.nan
            optimizer.step()
    assert one.skipped == two.skipped == 1
    assert len(calls) == 3 * (2 if entry.make is LANS else 1)
    assert_same(snapshot(one, ours), snapshot(two, theirs))


@every_optimizer
def test_tensors_that_move_keep_the_table(entry, interpreter):
    """A load, a gradient elsewhere or in another order: all of the same shapes."""
    ours, theirs = parameters(), parameters()
    one, two = entry(ours, fused=True), entry(theirs, foreach=True)
    run(one, ours, range(2))
    run(two, theirs, range(2))
    table = job_of(one).table
    one.load_state_dict(one.state_dict())
    two.load_state_dict(two.state_dict())
    for params, optimizer in ((ours, one), (theirs, two)):
        params[0].data = params[0].detach().clone()
        give_gradients(params, 3)
        params[0].grad = params[0].grad.t().contiguous().t()
        optimizer.step()
    assert job_of(one).table is table
    assert_rounded_alike(one, two)


@every_optimizer
def test_groups_without_parameters_and_without_elements(entry):
    p, empty = torch.full((3, 2), 0.5, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    optimizer = entry([{"params": []}, {"params": [empty]}, {"params": [p]}], fused=True)
    for value in (1.0, torch.inf):
        p.grad, empty.grad = torch.full_like(p, value), torch.zeros_like(empty)
        optimizer.step()
    assert job_of(optimizer).params == [p]
    assert optimizer.state[p]["step"] == 1
    assert [optimizer.state[q]["skipped"].item() for q in (empty, p)] == [1, 1]
    p.grad = empty.grad = None
    p.requires_grad_(False)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_what_kernels_cannot_take_goes_by_other_ways(interpreter, monkeypatch):
    monkeypatch.setattr(kernels, "_WARNED", set())
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    params = [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]
    optimizer = LANS(params, fused=True)
    with pytest.warns(UserWarning, match=r"one piece.*Remedy"):
        run(optimizer, params, [0])
    assert interpreter == []
    assert optimizer.state[params[0]]["step"] == 1


def test_a_kernel_that_cannot_be_compiled_changes_nothing(interpreter, monkeypatch):
    monkeypatch.setattr(kernels, "_WARNED", set())
    monkeypatch.setattr(kernels, "_BROKEN_DEVICE", [])

    def broken(*given, **constants):
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(device_job.device, "launch", broken)
    ours, theirs = parameters(), parameters()
    one, two = LANS(ours, fused=True), LANS(theirs, foreach=True)
    with pytest.warns(UserWarning, match="no such instruction"):
        run(one, ours, [0, 1])
    run(two, theirs, [0, 1])
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q)


def test_all_that_later_steps_may_need_is_compiled_before_the_first(interpreter, monkeypatch):
    """Views at odd places, and clipping that begins later, are other kernels."""
    ways, launch_chunks = [], device_job.device.launch_chunks

    def noted(name, *given, aligned, **constants):
        ways.append((name, aligned))
        launch_chunks(name, *given, aligned=aligned, **constants)

    monkeypatch.setattr(device_job.device, "launch_chunks", noted)
    params = parameters()
    optimizer = ScaledAdam(params, fused=True)
    run(optimizer, params, [0])
    names = ["scaled_adam_sums", "scaled_adam_update"]
    prepared = [(name, aligned) for aligned in (True, False) for name in names]
    assert ways[:4] == prepared
    assert len(ways) == 4 + 2
    assert interpreter.count("clip_and_learn") == 0
    optimizer.param_groups[0]["clipping_scale"] = 2.0
    run(optimizer, params, [1])
    assert ways[6:10] == prepared
    assert interpreter.count("clip_and_learn") == 3
    run(optimizer, params, [2])
    assert len(ways) == 14
