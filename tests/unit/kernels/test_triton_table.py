"""The table on a device: sent when it has changed, kept for graphs, and sums in a fixed order."""

from types import SimpleNamespace

import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreter")
# Bodies of kernels must see it.
triton = pytest.importorskip("triton")
tl = triton.language
CPU = torch.device("cpu")
TYPES = (torch.float32,) * 4


@pytest.fixture
def runtime(monkeypatch):
    from steadygrad.kernels.triton import runtime

    monkeypatch.setattr(runtime, "CHUNK", 16)
    return runtime


@pytest.fixture
def recording(runtime, monkeypatch):
    """Whether a graph records, which no CPU does: to be said by a test."""
    now = [False]
    monkeypatch.setattr(runtime, "is_recording", lambda device: now[0])
    return now


def tensors(count=3, size=5):
    return [torch.zeros(size) for _ in range(count)]


def filled(table, grads, weights=None, moments=None):
    weights = tensors(len(grads)) if weights is None else weights
    moments = (tensors(len(grads)), tensors(len(grads))) if moments is None else moments
    table.fill_states(moments)
    table.fill(weights, weights, grads)
    return weights, moments


def test_what_is_filled_in_arrives(runtime):
    table, grads = runtime.Table([5, 5, 5], TYPES, 2, CPU), tensors()
    grads[1] = None
    weights, moments = filled(table, grads)
    expected = [
        [0 if g is None else g.data_ptr(), w.data_ptr(), w.data_ptr(), m.data_ptr(), v.data_ptr()]
        for g, w, m, v in zip(grads, weights, *moments, strict=True)
    ]
    assert table.device_addresses.tolist() == expected
    assert table.aligned


def test_it_is_sent_only_if_something_has_changed(runtime):
    table, grads = runtime.Table([5, 5, 5], TYPES, 2, CPU), tensors()
    given = filled(table, grads)
    table.device_addresses[0, 0] = 99  # to be overwritten by the next copy
    filled(table, grads, *given)
    assert table.device_addresses[0, 0] == 99
    grads[2] = None
    filled(table, grads, *given)
    assert table.device_addresses[0, 0] == grads[0].data_ptr()


def test_memory_at_odd_places_is_noticed(runtime):
    table, grads = runtime.Table([5, 5, 5], TYPES, 2, CPU), tensors()
    grads[0] = torch.zeros(6)[1:]
    filled(table, grads)
    assert not table.aligned


def test_a_graph_has_a_table_that_later_steps_leave_alone(runtime, recording):
    table, grads = runtime.Table([5, 5, 5], TYPES, 2, CPU), tensors()
    given = filled(table, grads)
    own = table.device_addresses
    recording[0] = True
    static = tensors()
    filled(table, static, *given)
    graph, places = table.device_addresses, [t.data_ptr() for t in static]
    assert graph is not own
    recording[0] = False
    filled(table, [None, *grads[1:]], *given)
    assert table.device_addresses is own
    assert own[:, 0].tolist() == [0, *(t.data_ptr() for t in grads[1:])]
    assert graph[:, 0].tolist() == places


def test_graphs_with_equal_addresses_share_a_table(runtime, recording):
    """So recording the same step again and again takes no more memory."""
    table, grads = runtime.Table([5, 5, 5], TYPES, 2, CPU), tensors()
    given = filled(table, grads)
    recording[0], found = True, []
    for _ in range(2 * runtime.SPARES):
        filled(table, grads, *given)
        found.append(table.device_addresses)
    assert all(graph is found[0] for graph in found)


def test_too_many_graphs_at_a_time_are_refused(runtime, recording):
    table = runtime.Table([5, 5, 5], TYPES, 2, CPU)
    given = filled(table, tensors())
    recording[0] = True
    kept = [tensors() for _ in range(runtime.SPARES + 1)]
    for grads in kept[:-1]:
        filled(table, grads, *given)
    with pytest.raises(RuntimeError, match=r"at most 4 recorded steps.*Remedy"):
        filled(table, kept[-1], *given)
    recording[0] = False
    filled(table, kept[-1], *given)
    recording[0] = True
    filled(table, tensors(), *given)


def test_sums_of_tensors_are_those_of_their_chunks(runtime):
    """Also of an empty one, and of one with more chunks than are added up side by side."""
    sizes = [5, 0, 16 * 600 + 3, 40]
    table = runtime.Table(sizes, TYPES, 2, CPU)
    drawn = torch.randn(table.device_sums.shape, generator=torch.Generator().manual_seed(0))
    table.device_sums.copy_(drawn)
    ends = [1, 1, 601, 3]
    expected = torch.stack([part.sum(1) for part in drawn.double().split(ends, dim=1)], dim=1)
    found = table.sums(3, torch.float64)
    torch.testing.assert_close(found, expected)
    assert table.sums(2, torch.float32).shape == (2, 4)
    assert torch.equal(table.sums(3, torch.float64), found)


def test_starts_beyond_two_to_the_31(runtime, monkeypatch):
    monkeypatch.setattr(runtime, "CHUNK", 32768)
    table = runtime.Table([3 * 2**31], TYPES, 2, CPU)
    assert table.device_chunks[-1].tolist() == [0, 3 * 2**31 - 32768, 32768]
    assert table.device_chunks.dtype is torch.int64


@pytest.mark.parametrize("states", [1, 3])
def test_any_number_of_large_states(runtime, states, monkeypatch):
    from steadygrad.kernels.triton import memory

    monkeypatch.setitem(globals(), "memory", memory)

    @triton.jit
    def add(places, by, options, here):
        """The gradient to the first state and to the last."""
        g, first, last = memory.read_gradient(places[0], here, options[5]), places[2], places[-2]
        memory.write(first, here, memory.read(first, here) + g)
        memory.write(last, here, memory.read(last, here) + g)
        return ()

    grads, weights = ([torch.full((40,), value) for _ in range(2)] for value in (2.0, 0.5))
    moments = [[torch.full((40,), 10.0 * k) for _ in range(2)] for k in range(states)]
    table = runtime.Table([40, 40], TYPES, states, CPU)
    table.fill_states(moments)
    table.fill(weights, weights, grads)
    runtime.Pass(add, of_gradients=True)(SimpleNamespace(table=table, inverse_scale=None))
    expected = [4.0] if states == 1 else [2.0, 10.0, 22.0]
    for value, own in zip(expected, moments, strict=True):
        assert all(torch.equal(t, torch.full_like(t, value)) for t in own)
    assert all(torch.equal(w, torch.full_like(w, 0.5)) for w in weights)
