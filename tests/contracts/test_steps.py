"""A step of every optimizer of the table, in every mode and type."""

import copy

import pytest
import torch

from steadygrad._checks import InputError
from tests.contracts.problems import (
    assert_rounded_alike,
    assert_same,
    give_gradients,
    parameters,
    run,
    snapshot,
    tensors_of,
)
from tests.contracts.table import TABLE
from tests.covering import covering

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
every_optimizer = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.few(14)
@covering(entry=TABLE, dtype=DTYPES, maximize=[False, True])
def test_goes_in_the_right_direction(entry, dtype, maximize):
    draw = torch.Generator().manual_seed(0)
    target = torch.randn(6, 4, generator=draw).to(dtype)
    p = (torch.randn(6, 4, generator=draw) + 3).to(dtype).requires_grad_()
    optimizer = entry([p], lr=0.02, maximize=maximize)
    sign = -1.0 if maximize else 1.0

    def distance() -> torch.Tensor:
        return (p.float() - target.float()).square().mean()

    start = float(distance().detach())
    for _ in range(60):
        optimizer.zero_grad()
        (sign * distance()).backward()
        optimizer.step()
    assert float(distance().detach()) < 0.8 * start


@every_optimizer
@every_type
def test_state_keeps_types_and_shapes(entry, dtype):
    params = parameters(dtype)
    optimizer = entry(params)
    before = [(name, t.dtype, t.shape) for name, t in tensors_of(optimizer)]
    run(optimizer, params, range(9))
    assert [(name, t.dtype, t.shape) for name, t in tensors_of(optimizer)] == before
    state = optimizer.state[params[0]]
    for name in entry.large:
        is_coded = entry.coded and dtype is not torch.float64
        assert state[name].dtype in ((torch.uint8,) if is_coded else (torch.float32, torch.float64))
        assert state[name].shape == params[0].shape
    assert ("master_weight" in state) == (dtype in (torch.bfloat16, torch.float16))


@pytest.mark.few(28)
@covering(entry=TABLE, dtype=DTYPES, bad=[float("nan"), float("inf")])
def test_a_gradient_that_is_not_finite_changes_nothing(entry, dtype, bad):
    params, clean = parameters(dtype), parameters(dtype)
    optimizer, other = entry(params), entry(clean)
    for step in range(8):
        if step in (0, 3, 5):  # the very first step too, and one with a threshold to clip by
            give_gradients(params, step)
            params[4].grad[0, 1, 0] = bad
            before = snapshot(optimizer, params)
            optimizer.step()
            assert_same(before, snapshot(optimizer, params))
        run(optimizer, params, [step])
        run(other, clean, [step])
    assert optimizer.skipped == 3
    assert other.skipped == 0
    # As if the bad batches had never been seen.
    assert_same(snapshot(optimizer, params), snapshot(other, clean))


@every_optimizer
def test_zero_weights_move_and_stay_finite(entry):
    params = [torch.zeros(4, 3, requires_grad=True), torch.zeros((), requires_grad=True)]
    run(entry(params), params, range(6), none=False)
    assert all(torch.isfinite(p).all() and p.abs().max() > 0 for p in params)


@every_optimizer
def test_none_gradients_mean_what_the_entry_says(entry):
    params = parameters()
    optimizer = entry(params)
    run(optimizer, params, range(3), none=False)
    before = params[0].detach().clone()
    give_gradients(params, 3)
    params[0].grad = None
    optimizer.step()
    assert (not torch.equal(before, params[0])) == entry.none_moves


@every_optimizer
def test_no_gradient_at_all(entry):
    params = parameters()
    optimizer = entry(params)
    before = [p.detach().clone() for p in params]
    optimizer.step()
    assert_same(before, [p.detach() for p in params])


@every_optimizer
def test_gradients_are_left_as_they_are(entry):
    params = parameters()
    optimizer = entry(params)
    for step in range(7):
        give_gradients(params, step, none=False)
        before = [p.grad.clone() for p in params]
        optimizer.step()
        assert_same(before, [p.grad for p in params])


@every_optimizer
def test_a_learning_rate_of_zero_moves_no_weight(entry):
    params = parameters()
    before = [p.detach().clone() for p in params]
    run(entry(params, lr=0.0), params, range(5))
    assert_same(before, [p.detach() for p in params])


@every_optimizer
# Blocks of codes lie within rows, so loops take contiguous ones only.
@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
def test_layouts_other_than_contiguous(entry):
    draw = torch.Generator().manual_seed(0)
    plain = [torch.randn(2, 3, 4, 5, generator=draw), torch.randn(6, 4, generator=draw)]
    odd = [plain[0].to(memory_format=torch.channels_last), plain[1].t().contiguous().t()]
    plain = [p.clone().requires_grad_() for p in plain]
    odd = [p.clone(memory_format=torch.preserve_format).requires_grad_() for p in odd]
    assert not odd[0].is_contiguous()
    ours, theirs = entry(plain), entry(odd)
    run(ours, plain, range(6), none=False)
    run(theirs, odd, range(6), none=False)
    # Sums in another order.
    assert_rounded_alike(ours, theirs)
    assert not odd[0].is_contiguous()


@every_optimizer
def test_a_closure_is_evaluated_with_gradients(entry):
    p = torch.ones(3, requires_grad=True)
    optimizer = entry([p])

    def closure():
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    assert float(optimizer.step(closure).detach()) == 3.0
    assert optimizer.step() is None
    assert not torch.equal(p, torch.ones(3))


@every_optimizer
def test_a_group_added_later_takes_part(entry):
    params, late = parameters(), torch.full((3, 3), 0.5, requires_grad=True)
    optimizer = entry(params)
    run(optimizer, params, range(2))
    optimizer.add_param_group({"params": [late], "lr": 0.05})
    assert optimizer.state[late]["step"] == 0
    run(optimizer, [*params, late], range(2, 4))
    assert optimizer.state[late]["step"] == 2
    assert optimizer.state[params[0]]["step"] == 4
    assert not torch.equal(late, torch.full((3, 3), 0.5))


@every_optimizer
def test_generators_and_names(entry):
    model = torch.nn.Linear(3, 2)
    assert entry(model.named_parameters()).param_groups[0]["param_names"] == ["weight", "bias"]
    assert len(entry(model.parameters()).param_groups[0]["params"]) == 2
    grouped = entry([{"params": (p for p in model.parameters())}])
    assert len(grouped.param_groups[0]["params"]) == 2


@every_optimizer
def test_what_cannot_be_optimized_is_refused(entry):
    with pytest.raises(InputError, match=r"real floating type.*complex64.*view_as_real"):
        entry([torch.zeros(3, dtype=torch.complex64, requires_grad=True)])
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = entry(embedding.parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    before = snapshot(optimizer, embedding.parameters())
    with pytest.raises(InputError, match=r"dense gradients.*sparse=False"):
        optimizer.step()
    assert_same(before, snapshot(optimizer, embedding.parameters()))


@every_optimizer
def test_deepcopy_goes_its_own_way(entry):
    params = parameters()
    optimizer = entry(params)
    run(optimizer, params, range(3))
    twin = copy.deepcopy(optimizer)
    copies = [p for g in twin.param_groups for p in g["params"]]
    run(optimizer, params, range(3, 8))
    run(twin, copies, range(3, 8))
    assert_same(snapshot(optimizer, params), snapshot(twin, copies))
    run(twin, copies, [9])
    assert not torch.equal(params[0], copies[0])


@every_optimizer
def test_frozen_parameters_stay_as_they_are(entry):
    """Also those whose size or value is beyond what a rule allows."""
    params = [(torch.ones(4, 4) * 50).requires_grad_(), torch.tensor(50.0, requires_grad=True)]
    params += parameters()
    optimizer = entry(params)
    for p in params[:2]:
        p.requires_grad_(False)
    for step in range(9):
        give_gradients(params[2:], step)
        optimizer.step()
    assert torch.equal(params[0], torch.full((4, 4), 50.0))
    assert params[1] == 50
    assert optimizer.state[params[0]]["step"] == 0
    assert optimizer.state[params[2]]["step"] == 9


@every_optimizer
def test_a_group_without_parameters_has_skipped_nothing(entry):
    optimizer = entry([{"params": []}])
    optimizer.step()
    assert optimizer.skipped == 0
