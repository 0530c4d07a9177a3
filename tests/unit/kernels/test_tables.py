"""The table of chunks covers every element once, and its sums do not depend on who adds them."""

import numpy as np
import pytest
import torch

from steadygrad.kernels import cpu, threads
from steadygrad.kernels.tables import CHUNK, ChunkTable, Job

FLOATS = (torch.float32,) * 4
SIZES = [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5, 7]


def test_every_element_is_in_one_chunk():
    table = ChunkTable(SIZES, 5)
    assert table.elements == sum(SIZES)
    for tensor, size in enumerate(SIZES):
        own = table.chunks[table.chunks[:, 0] == tensor]
        covered = np.concatenate([np.arange(start, start + n) for _, start, n in own])
        assert np.array_equal(covered, np.arange(size))
        assert own[:, 2].max() <= CHUNK


def test_starts_beyond_two_to_the_31():
    table = ChunkTable([3 * 2**31], 1)
    assert table.chunks[-1].tolist() == [0, 3 * 2**31 - CHUNK, CHUNK]
    assert table.chunks.dtype == np.int64


def table_of(tensors):
    table = ChunkTable([t.numel() for t in tensors], 5)
    table.addresses[:, 0] = [t.data_ptr() for t in tensors]
    return table


def whole(table):
    """The first sums, of whole tensors."""
    return np.add.reduceat(table.sums[:, 0], table.firsts)


def square_sums(tensors):
    table = table_of(tensors)
    cpu.launch("square_sums", FLOATS, table)
    return whole(table)


def drawn():
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=draw) for size in SIZES]


def test_sums_are_those_of_float64():
    expected = [float(t.double().square().sum()) for t in drawn()]
    # Blocks of 4096 are added up in float32, by 64 numbers side by side.
    np.testing.assert_allclose(square_sums(drawn()), expected, rtol=1e-6)


def test_no_gradient_counts_as_zeros():
    tensors = drawn()
    table = table_of(tensors)
    table.addresses[3, 0] = 0
    cpu.launch("square_sums", FLOATS, table)
    found = whole(table)
    assert found[3] == 0
    assert np.array_equal(np.delete(found, 3), np.delete(square_sums(tensors), 3))


@pytest.mark.parametrize("how", ["team", "pool"])
def test_sums_do_not_depend_on_the_number_of_threads(how, monkeypatch):
    if how == "pool":
        monkeypatch.setattr(threads, "_team", lambda: None)
    elif threads._team() is None:
        pytest.skip("torch has no OpenMP of its own here")
    tensors, before = drawn(), torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            found.append(square_sums(tensors))
    finally:
        torch.set_num_threads(before)
    assert found[0].min() > 0
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("how", ["team", "pool"])
def test_an_error_meanwhile_leaves_the_threads_usable(how, error, monkeypatch):
    """A kernel that has begun comes to its end, and another can begin."""
    if how == "pool":
        monkeypatch.setattr(threads, "_team", lambda: None)
    elif threads._team() is None:
        pytest.skip("torch has no OpenMP of its own here")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    tensors = drawn()
    expected = square_sums(tensors)

    def fail():
        raise error

    table = table_of(tensors)
    with pytest.raises(error):
        cpu.launch("square_sums", FLOATS, table, meanwhile=fail)
    assert np.array_equal(whole(table), expected)
    assert np.array_equal(square_sums(tensors), expected)


def test_a_job_names_every_place():
    job = ChunkTable(SIZES, 5).job(factors=11, settings=22)
    assert len(job) == len(Job)
    assert (job[Job.FACTORS], job[Job.SETTINGS]) == (11, 22)
    assert (job[Job.TENSORS], job[Job.FIELDS]) == (len(SIZES), 5)
    assert job[Job.COUNTER] % 64 == 0 or job[Job.COUNTER] > 0
