"""Triton's kernels take the steps of the formulas: by its interpreter, on a CPU."""

import pytest
import torch

from steadygrad import kernels
from steadygrad.optim import LANS, ScaledAdam
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
# The interpreter takes long: one variant of each optimizer, that with the most options, is quick.
QUICK = {"lans-bounded", "lamb-nvidia", "scaled_adam-clipped"}
every_optimizer = pytest.mark.parametrize(
    "entry",
    [
        pytest.param(entry, id=name, marks=() if name in QUICK else pytest.mark.slow)
        for name, entry in OPTIMIZERS.items()
    ],
)
TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
LANS_LAUNCHES = ["square_gradients", "sum_kernel", "move_moments", "sum_kernel", "move_weights"]
SCALED_ADAM_LAUNCHES = ["square_sums", "sum_kernel", "move_all", "sum_kernel"]


@pytest.fixture
def runtime(interpreter):
    """The module that starts kernels, which has compiled none of them yet."""
    from steadygrad.kernels.triton import runtime

    runtime._prepare.cache_clear()
    yield runtime
    runtime._prepare.cache_clear()


@pytest.fixture
def small_chunks(runtime, monkeypatch):
    """Chunks so small that the largest of these tensors have two."""
    monkeypatch.setattr(runtime, "CHUNK", 16)


def tables_of(optimizer):
    return [batch.table for batch in optimizer._built]


def mixed(types=TYPES):
    """All types in two groups, some of them frozen, some without gradients at times."""
    groups = [parameters(dtype)[:5:2] + parameters(dtype)[1:2] for dtype in types]
    params = [p for group in groups for p in group]
    params[2].requires_grad_(False)
    return params


def groups_of(params):
    # Options of their own, and types that are split between the groups.
    return [{"params": params[::2]}, {"params": params[1::2], "lr": 0.004, "betas": (0.8, 0.95)}]


def fill(params, step):
    give_gradients(params, step)
    params[2].grad = None


@pytest.mark.slow
@every_optimizer
@pytest.mark.usefixtures("small_chunks")
def test_a_model_of_all_types(entry):
    # A norm over all gradients brings the roundings of narrow types to float64.
    types = TYPES[: 3 if "max_grad_norm" in entry.options else 4]
    ours, theirs = mixed(types), mixed(types)
    one, two = entry(groups_of(ours), fused=True), entry(groups_of(theirs), foreach=True)
    for step in range(6):
        for params, optimizer in ((ours, one), (theirs, two)):
            fill(params, step)
            if step == 3:
                params[0].grad[1, 1] = torch.inf
            if step == 4:
                params[4].data[0, 0] = 0.75  # written from outside: a master must follow
            optimizer.step()
    assert any(len(table.chunks) > len(table.addresses) for table in tables_of(one))
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


@pytest.mark.parametrize(
    ("make", "expected"), [(LANS, LANS_LAUNCHES), (ScaledAdam, 2 * SCALED_ADAM_LAUNCHES)]
)
def test_launches_do_not_grow_with_the_model(interpreter, make, expected):
    """ScaledAdam works on one-element parameters by themselves."""
    for params in (parameters()[:4], [p for _ in range(3) for p in parameters()]):
        optimizer = make(params, fused=True)
        run(optimizer, params, [0])  # compiles
        interpreter.clear()
        run(optimizer, params, [1])
        assert sorted(interpreter) == sorted(expected)


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
def test_tensors_that_move_are_found(entry):
    """A load, a gradient elsewhere or in another order: all of the same shapes."""
    ours, theirs = parameters(), parameters()
    one, two = entry(ours, fused=True), entry(theirs, foreach=True)
    run(one, ours, range(2))
    run(two, theirs, range(2))
    one.load_state_dict(one.state_dict())
    two.load_state_dict(two.state_dict())
    for params, optimizer in ((ours, one), (theirs, two)):
        params[0].data = params[0].detach().clone()
        give_gradients(params, 3)
        params[0].grad = params[0].grad.t().contiguous().t()
        optimizer.step()
    assert_rounded_alike(one, two)


@every_optimizer
def test_groups_without_parameters_and_without_elements(entry):
    p, empty = torch.full((3, 2), 0.5, requires_grad=True), torch.zeros(0, 3, requires_grad=True)
    optimizer = entry([{"params": []}, {"params": [empty]}, {"params": [p]}], fused=True)
    for value in (1.0, torch.inf):
        p.grad, empty.grad = torch.full_like(p, value), torch.zeros_like(empty)
        optimizer.step()
    assert [batch.params for batch in optimizer._built] == [[p]]
    assert optimizer.state[p]["step"] == 1
    assert [optimizer.state[q]["skipped"].item() for q in (empty, p)] == [1, 1]
    p.grad = empty.grad = None
    p.requires_grad_(False)
    optimizer.step()
    assert optimizer.state[p]["step"] == 1


def test_what_kernels_cannot_take_goes_by_other_ways(monkeypatch):
    monkeypatch.setattr(kernels, "_WARNED", set())
    base = torch.randn(8, 6, generator=torch.Generator().manual_seed(0))
    params = [base[:, ::2].detach().requires_grad_(), base[:, 1].clone().requires_grad_()]
    optimizer = LANS(params, fused=True)
    with pytest.warns(UserWarning, match=r"gaps.*strides.*Remedy"):
        run(optimizer, params, [0])
    assert [table is None for table in tables_of(optimizer)] == [True, False]
    assert optimizer.state[params[0]]["step"] == 1


def broken(monkeypatch, runtime, error):
    """Lets every launch fail."""

    def fail(*given, **named):
        raise error

    monkeypatch.setattr(kernels, "_WARNED", set())
    monkeypatch.setattr(kernels, "BROKEN", {})
    monkeypatch.setattr(runtime, "_start", fail)


@every_optimizer
def test_a_kernel_that_cannot_be_compiled_changes_nothing(entry, runtime, monkeypatch):
    broken(monkeypatch, runtime, RuntimeError("no such instruction"))
    ours, theirs = parameters(), parameters()
    one, two = entry(ours, fused=True), entry(theirs, foreach=True)
    with pytest.warns(UserWarning, match="no such instruction"):
        run(one, ours, [0, 1])
    run(two, theirs, [0, 1])
    assert_same(snapshot(one, ours), snapshot(two, theirs))


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("out of memory"), RuntimeError("Triton Error [CUDA]: misaligned")],
    ids=["memory", "device"],
)
def test_an_error_of_the_device_is_passed_on(error, runtime, monkeypatch):
    """It says nothing about the kernels, which the next step tries again."""
    params = parameters()
    optimizer = LANS(params, fused=True)
    with monkeypatch.context() as patch:
        broken(patch, runtime, error)
        with pytest.raises(type(error), match=str(error)[:6]):
            run(optimizer, params, [0])
        assert kernels.BROKEN == {}
    run(optimizer, params, [0])
    assert None not in tables_of(optimizer)


def test_an_error_between_launches_leaves_the_next_step_alone(interpreter, monkeypatch):
    """A gradient that is not finite, and an error before the step that it stops has ended."""
    params = parameters()
    optimizer = LANS(params, fused=True)
    run(optimizer, params, [0])
    passes = optimizer._built[0].passes
    with monkeypatch.context() as patch:
        patch.setattr(passes, "apply", lambda *given: 1 / 0)
        give_gradients(params, 1)
        params[0].grad[0, 0] = torch.nan
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    before = params[0].detach().clone()
    run(optimizer, params, [2])
    assert optimizer.skipped == 0
    assert not torch.equal(params[0], before)


def test_all_that_later_steps_may_need_is_compiled_before_the_first(runtime, monkeypatch):
    """Views at odd places are other kernels; options are not."""
    ways, start = [], runtime._start

    def noted(kernel, *given, **named):
        ways.append((named.get("body", kernel).fn.__name__, named.get("aligned")))
        start(kernel, *given, **named)

    monkeypatch.setattr(runtime, "_start", noted)
    params = parameters()[:2]
    optimizer = ScaledAdam(params, fused=True)
    run(optimizer, params, [0])
    both = [(True, False), (True, False)]
    names = ["square_sums", "move_all"]
    prepared = [
        way
        for name, values in zip(names, both, strict=True)
        for way in [*((name, aligned) for aligned in values), ("sum_kernel", None)]
    ]
    assert ways[:6] == prepared
    assert len(ways) == 6 + 4
    optimizer.param_groups[0].update(clipping_scale=2.0, eps=1e-6, betas=(0.8, 0.9))
    run(optimizer, params, [1])
    assert len(ways) == 6 + 4 + 4


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_weights_that_are_not_finite_are_noticed_where_they_count(mode):
    """In the same steps in every mode: at size steps, the fourth of every four."""
    p, q = (torch.ones(9, 9, requires_grad=True) for _ in range(2))
    optimizer, moved = ScaledAdam([p, q], **{mode: True}), []
    for number in range(12):
        if number == 5:
            p.data[0, 0] = torch.nan
        for x in (p, q):
            x.grad = torch.randn(9, 9, generator=torch.Generator().manual_seed(number))
        before = q.detach().clone()
        optimizer.step()
        moved.append(not torch.equal(q, before))
    # The eighth step learns sizes; as it is not taken, so is any after it.
    assert moved == [True] * 7 + [False] * 5


@pytest.mark.parametrize("mode", ["fused", "foreach"])
def test_a_norm_that_overflows_skips_the_step(mode):
    params = parameters()
    optimizer = LANS(params, **{mode: True})
    run(optimizer, params, [0])
    give_gradients(params, 1, none=False)
    params[0].grad.fill_(3e19)
    before = snapshot(optimizer, params)
    optimizer.step()
    assert optimizer.skipped == 1
    assert_same(before, snapshot(optimizer, params))
