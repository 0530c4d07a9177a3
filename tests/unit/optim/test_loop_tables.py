"""The table of chunks covers every element once, and its sums do not depend on who adds them."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.optim import LANS
from steadygrad.optim.layerwise_rule import LANS_PASSES
from steadygrad.optim.loops import runtime
from steadygrad.optim.loops.numbers import (
    BLOCK,
    GRAD,
    PARAM,
    STATES,
    WEIGHT,
    arrays_at,
    block_of,
    state_at,
    take_turn,
)
from steadygrad.optim.loops.runtime import CHUNK, Table, run
from steadygrad.optim.passes import Pass, addresses_of

FLOATS = (torch.float32,) * 4
SIZES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 7]


def test_every_element_is_in_one_chunk():
    table = Table(SIZES, FLOATS, 2)
    assert table.elements == sum(SIZES)
    assert (table.chunks[:, 5] == BLOCK).all()
    for tensor, size in enumerate(SIZES):
        own = table.chunks[table.chunks[:, 0] == tensor]
        covered = np.concatenate([np.arange(start, start + n) for _, start, n, *_ in own])
        assert (own[:, 3:5] == [table.firsts[tensor], table.firsts[tensor] + len(own)]).all()
        assert np.array_equal(covered, np.arange(size))
        assert own[:, 2].max() <= CHUNK
        assert table.chunks[table.firsts[tensor], 0] == tensor


def test_starts_beyond_two_to_the_31():
    table = Table([3 * 2**31], FLOATS, 1)
    last = [0, 3 * 2**31 - CHUNK, CHUNK, 0, 3 * 2**31 // CHUNK, BLOCK]
    assert table.chunks[-1].tolist() == last
    assert table.chunks.dtype == np.int64


def test_addresses_stand_in_their_columns():
    tensors = [[torch.zeros(3) for _ in range(2)] for _ in range(5)]
    params, weights, grads, m, v = tensors
    addresses = np.array([addresses_of(own) for own in (grads, params, weights)])
    addresses[0, 0] = 0
    # Those of a batch, and of the last of its tensors.
    for members in ([0, 1], [1]):
        table = Table([3] * len(members), FLOATS, 2, members=members)
        table.fill_states((m, v))
        table.fill(addresses, np.array([False, True]))
        for column, own in ((PARAM, params), (WEIGHT, weights), (STATES, m), (STATES + 1, v)):
            found = table.addresses[:, column].tolist()
            assert found == [own[i].data_ptr() for i in members]
        assert table.addresses[-1, GRAD] == grads[1].data_ptr()
    with pytest.raises(InputError, match="memory"):
        table.fill(0 * addresses, np.array([False, True]))


def table_of(tensors):
    table = Table([t.numel() for t in tensors], FLOATS, 2)
    table.addresses[:, GRAD] = [t.data_ptr() for t in tensors]
    return table


def sums_of(table):
    return LANS_PASSES.grad_sq_norms(
        SimpleNamespace(
            tables=[table],
            device=torch.device("cpu"),
            sum_dtype=torch.float64,
            inverse_scale=None,
            seeds=None,
        )
    )[0]


def square_sums(tensors):
    return sums_of(table_of(tensors))


def drawn():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw) for size in SIZES]


def test_sums_are_those_of_float64():
    expected = torch.stack([t.double().square().sum() for t in drawn()])
    # Blocks of 4096 are added up in float32, by 64 numbers side by side.
    torch.testing.assert_close(square_sums(drawn()), expected, rtol=1e-6, atol=0)


def test_no_gradient_counts_as_zeros():
    tensors = drawn()
    table = table_of(tensors)
    table.addresses[3, GRAD] = 0
    found, expected = sums_of(table), square_sums(tensors)
    expected[3] = 0
    assert torch.equal(found, expected)


def test_sums_do_not_depend_on_the_number_of_threads():
    tensors, before = drawn(), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(square_sums(tensors))
    finally:
        torch.set_num_threads(before)
    assert found[0].min() > 0
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_weights_move_by_the_sums_of_all_threads():
    tensor, found = torch.randn(5 * CHUNK + 3, generator=torch.Generator().manual_seed(0)), []
    before = torch.get_num_threads()
    try:
        for count in (1, 4):
            torch.set_num_threads(count)
            p = tensor.clone().requires_grad_()
            optimizer = LANS([p], lr=0.1, fused=True)
            for _ in range(20):
                p.grad = tensor + p.detach()
                optimizer.step()
            found.append(p.detach())
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


@pytest.mark.parametrize("states", [1, 3])
def test_any_number_of_large_states(states, monkeypatch):
    @block_of
    def block(args, row, first, size, by, given, types):
        g, x, _p = arrays_at(args, row, first, size, types)
        for k in range(states):
            own = state_at(row, k, first, size, types)
            for i in range(size):
                own[i] += (k + 1) * g[i] + x[i]
        return (0.0,)

    def make(types):
        def kernel(data):
            take_turn(block, data, types, True)

        return kernel

    sizes = [5, CHUNK + 3]
    grads, weights = ([torch.full((n,), value) for n in sizes] for value in (2.0, 0.5))
    moments = [[torch.full((n,), 10.0 * k) for n in sizes] for k in range(states)]
    table = Table(sizes, FLOATS, states)
    table.fill_states(moments)
    places = [addresses_of(own) for own in (grads, weights, weights)]
    table.fill(np.array(places), np.array([True, True]))
    monkeypatch.setattr(runtime, "named", lambda place: make)
    run([table], Pass(None), (), (), torch.float32, None)
    for k, own in enumerate(moments):
        for tensor in own:
            assert torch.equal(tensor, torch.full_like(tensor, 10.0 * k + 2 * (k + 1) + 0.5))
    assert all(torch.equal(w, torch.full_like(w, 0.5)) for w in weights)
