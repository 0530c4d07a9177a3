"""Which processes a packed sum goes to, and with which shares; on a process group that only acts.

A fake group lets one process stand for a rank among many: its collectives leave tensors as they
are. What is really added up is tested in tests/distributed.
"""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from steadygrad import shards
from steadygrad._checks import InputError
from steadygrad.shards import PackedSum, PartialGradients, is_sharded, local, shared_out

R, S = Replicate(), Shard(0)


@pytest.fixture
def world(monkeypatch):
    """Starts this process as a rank of a fake world.

    ``.calls`` lists (ranks, tensor) of the sums sent, ``.agreed`` the ranks that named a group.
    """

    class World:
        def __init__(self) -> None:
            self.calls, self.agreed = [], []

        def start(self, size, rank=0):
            dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())

        def send(self, tensor, op=dist.ReduceOp.SUM, group=None):
            ranks = dist.get_process_group_ranks(group)
            # Counts are what processes agree on once.
            if not tensor.is_floating_point():
                self.agreed.append(ranks)
            else:
                self.calls.append((ranks, tensor.clone()))

    found = World()
    monkeypatch.setattr(dist, "all_reduce", found.send)
    yield found
    if dist.is_initialized():
        dist.destroy_process_group()


def on(mesh, *placements):
    return DTensor.from_local(torch.ones(2, 2), mesh, placements, run_check=False)


def three_axes(world, rank=5):
    world.start(8, rank)
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copy", "part", "tp"))


def sent(world):
    return [tensor.tolist() for _, tensor in world.calls]


def test_without_processes_a_sum_is_the_value_itself(world):
    columns = torch.tensor([[1.0, 2.0]])
    total = PackedSum([torch.ones(2), torch.ones(3)])
    assert total.collectives == 0
    assert total.of_all(columns) is columns
    assert not is_sharded(columns)
    assert local(columns) is columns


def test_shards_of_one_mesh_go_to_all_of_it(world):
    world.start(8, 3)
    mesh = init_device_mesh("cpu", (8,))
    total = PackedSum([on(mesh, S), on(mesh, S)])
    result = total.of_all(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert total.collectives == len(world.calls) == 1
    assert world.calls[0][0] == list(range(8))
    # Each row ends in the column of the flag.
    assert sent(world) == [[1.0, 2.0, 0.0, 3.0, 4.0, 0.0]]
    assert result.tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert result.dtype == torch.float32


def test_columns_that_a_process_does_not_work_on_travel_as_zeros(world):
    world.start(2)
    mesh, flag = init_device_mesh("cpu", (2,)), torch.tensor(True)
    total = PackedSum([on(mesh, S)] * 3)
    index = torch.tensor([2, 0])
    (sums,), is_up, _ = total([index], [torch.tensor([[5.0, 4.0]])], 1, flag)
    assert sent(world) == [[4.0, 0.0, 5.0, 1.0]]
    assert sums.tolist() == [[5.0, 4.0]]
    assert is_up
    assert total([], [], 1)[0] == []
    assert sent(world)[1] == [0.0, 0.0, 0.0, 0.0]


def test_copies_elsewhere_are_not_asked(world):
    mesh = three_axes(world)
    tensors = [on(mesh, R, S, R), on(mesh, R, R, R)]
    result = PackedSum(tensors).of_all(torch.tensor([[1.0, 4.0]]))
    # Rank 5 is at (1, 0, 1): with 7 it makes up the shards.
    assert world.calls[0][0] == [5, 7]
    # They have two copies of the whole tensor.
    assert sent(world) == [[1.0, 2.0, 0.0]]
    assert result.tolist() == [[1.0, 2.0]]


def test_copies_are_asked_beside_plain_tensors(world):
    """A finding in a plain tensor must reach the copies of the others."""
    mesh = three_axes(world)
    total = PackedSum([on(mesh, R, S, R), torch.ones(3)])
    result = total.of_all(torch.tensor([[1.0, 2.0]]))
    assert world.calls[0][0] == list(range(8))
    # Two shards among eight processes: four copies of each value.
    assert sent(world) == [[0.25, 0.0]]
    assert result.tolist() == [[0.25, 2.0]]


def test_other_axes_of_a_mesh_travel_together_with_shares(world):
    mesh = three_axes(world)
    # FSDP alone and tensor parallelism alone, each on its part of the mesh, and both.
    tensors = [on(mesh["part"], S), on(mesh["tp"], S), on(mesh["part", "tp"], S, Shard(1))]
    result = PackedSum(tensors).of_all(torch.ones(1, 3))
    assert [ranks for ranks, _ in world.calls] == [[4, 5, 6, 7]]
    # Along one axis, then the other: so all four have agreed on the new group's name. Before that
    # all that share an axis, or all of the mesh, on whether they hold tensors of several kinds.
    assert world.agreed[-2:] == [[5, 7], [4, 5]]
    # Who is elsewhere along the other axis may hold another tensor, and has a column of its own:
    # rank 5 is the first along `part` and the second along `tp`.
    assert sent(world) == [[0.0, 1.0, 1.0, 0.0, 1.0, 0.0]]
    assert result.tolist() == [[1.0, 1.0, 1.0]]


def test_copies_are_asked_beside_tensors_on_a_part_of_the_mesh(world):
    """A part's tensor may differ from another part's, and with it what is found in it."""
    mesh = three_axes(world)
    total = PackedSum([on(mesh["tp"], S), on(mesh["copy", "tp"], R, R)])
    result = total.of_all(torch.tensor([[1.0, 3.0]]))
    # Rank 5 is at (1, 0, 1): a column for each part, a quarter of each of four copies, the flag.
    assert world.calls[0][0] == [0, 1, 4, 5]
    assert sent(world) == [[0.0, 1.0, 0.75, 0.0]]
    assert not total.is_uniform
    assert result.tolist() == [[1.0, 0.75]]


@pytest.mark.parametrize(
    ("rank", "columns"), [(0, [1.0, 0.0, 1.0]), (1, [0.0, 1.0, 1.0]), (2, [1.0, 0.0, 1.0])]
)
def test_parts_of_a_group_go_by_the_order_of_its_mesh(world, rank, columns):
    world.start(4, rank)
    both = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "b"))
    half = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("c", "d"))["d"]
    PackedSum([on(half, S), on(both, S, Shard(1))]).of_all(torch.ones(1, 2))
    assert [ranks for ranks, _ in world.calls] == [[0, 1, 2, 3]]
    assert sent(world) == [[*columns, 0.0]]


@pytest.mark.parametrize(("size", "part"), [(4, [1, 2]), (3, [0, 1])])
def test_parts_that_do_not_fill_a_group_make_a_collective_of_their_own(world, size, part):
    world.start(size, 1)
    mesh = DeviceMesh("cpu", [*range(size)], mesh_dim_names=("a",))
    some = DeviceMesh("cpu", part, mesh_dim_names=("b",))
    PackedSum([on(mesh, S), on(some, S)]).of_all(torch.ones(1, 2))
    assert [ranks for ranks, _ in world.calls] == [[*range(size)], part]


def test_means_over_processes_that_may_differ(world):
    """A sum over a tensor of all four, one that two parts hold, and a plain one."""
    mesh = three_axes(world, 0)
    tensors = [on(mesh["part", "tp"], S, Shard(1)), on(mesh["tp"], S), torch.ones(3)]
    total, terms = PackedSum(tensors), torch.tensor([[8.0, 4.0, 2.0], [0.0, 0.0, 1.0]])
    assert not total.is_uniform
    index, columns = torch.arange(3), torch.ones(1, 3)
    _, _, means = total([index], [columns], 1, None, [(slice(0, 2), terms)], 2)
    assert world.calls[0][0] == [0, 1, 2, 3]
    # Of the sums over the group's parts the mean of two, of the plain values that of four.
    assert sent(world) == [[1.0, 1.0, 0.0, 0.0, 8.0 + 4.0 / 2 + 2.0 / 4, 1.0 / 4]]
    assert means.tolist() == [10.5, 0.25]
    assert PackedSum(tensors[:1]).is_uniform


def test_processes_among_anothers_travel_with_them(world):
    world.start(8, 2)
    wide, narrow = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (4, 2))
    tensors = [on(narrow, S, R), on(wide, S), on(narrow, S, S)]
    PackedSum(tensors).of_all(torch.ones(1, 3))
    assert [ranks for ranks, _ in world.calls] == [list(range(8))]
    # Two copies of the first.
    assert sent(world) == [[0.5, 1.0, 1.0, 0.0]]


def test_a_flattened_axis_beside_the_axis_it_lies_next_to(world):
    mesh = three_axes(world, 0)
    flat = mesh["copy", "part"]._flatten("dp")
    # As FSDP2 lays out a parameter that tensor parallelism has split before.
    both = DeviceMesh._concatenate([flat, mesh["tp"]])
    tensors = [on(flat, S), on(both, S, Shard(1))]
    PackedSum(tensors).of_all(torch.ones(1, 2))
    assert [ranks for ranks, _ in world.calls] == [list(range(8))]
    assert sent(world) == [[1.0, 0.0, 1.0, 0.0]]


def test_parts_beside_each_other_pass_on_what_they_find(world):
    """Nothing public leads from one to the other: two sums, one after the other."""
    mesh = three_axes(world)
    total = PackedSum([on(mesh["part"], S), on(mesh["tp"], S)])
    index, columns, terms = torch.arange(2), torch.ones(1, 2), torch.ones(1, 2)
    _, is_up, means = total([index], [columns], 1, torch.tensor(True), [(slice(0, 1), terms)], 1)
    assert total.collectives == 2
    assert [ranks for ranks, _ in world.calls] == [[5, 7], [4, 5]]
    # Column, flag and joint sum: of a tensor of one pair the mean over the other pairs.
    assert sent(world) == [[1.0, 1.0, 1.0]] * 2
    assert is_up
    assert means.tolist() == [1.0]


def test_unrelated_meshes_make_a_collective_each(world):
    world.start(8, 0)
    first = DeviceMesh("cpu", [0, 1, 2, 3], mesh_dim_names=("a",))
    second = DeviceMesh("cpu", [0, 4], mesh_dim_names=("b",))
    total = PackedSum([on(first, S), on(second, S), on(first, S)])
    result = total.of_all(torch.tensor([[1.0, 2.0, 3.0]]))
    assert total.collectives == 2
    assert [ranks for ranks, _ in world.calls] == [[0, 1, 2, 3], [0, 4]]
    assert sent(world) == [[1.0, 3.0, 0.0], [2.0, 0.0]]
    assert result.tolist() == [[1.0, 2.0, 3.0]]


def test_a_share_has_all_the_digits_of_the_sum(world):
    world.start(6)
    mesh = init_device_mesh("cpu", (2, 3))
    PackedSum([on(mesh, S, R), on(mesh, S, S)]).of_all(torch.ones(1, 2))
    assert sent(world) == [[1 / 3, 1.0, 0.0]]


def test_a_group_is_made_once_in_a_world(world, monkeypatch):
    made, original = [], dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **more: made.append(ranks) or original(ranks, **more)
    )
    for count in (1, 2):
        mesh = three_axes(world)
        before = len(made)
        for _ in range(3):
            PackedSum([on(mesh, R, S, S)])
            # All processes have one already.
            PackedSum([on(mesh, S, S, S)])
        assert len(made) == before + 1
        # The groups of a world that has ended are of no use in the next.
        assert made.count([4, 5, 6, 7]) == count
        dist.destroy_process_group()


def test_one_process_needs_no_collective(world):
    world.start(2)
    mesh = init_device_mesh("cpu", (1, 2))
    total = PackedSum([on(mesh, S, R)])
    assert total.of_all(torch.ones(1, 1)).tolist() == [[1.0]]
    assert total.collectives == len(world.calls) == 0


@pytest.mark.parametrize(
    ("rank", "placement", "match"), [(0, Partial(), "Partial"), (2, S, "process is at None")]
)
def test_partial_sums_and_meshes_without_this_process_are_refused(world, rank, placement, match):
    world.start(4, rank)
    mesh = DeviceMesh("cpu", [0, 1])
    with pytest.raises(InputError, match=match):
        PackedSum([on(mesh, placement)])


def test_partial_gradients_are_added_up_together(world):
    world.start(4)
    mesh = init_device_mesh("cpu", (2, 2))
    gradients = [
        on(mesh, R, Partial()),
        on(mesh, R, S),
        on(mesh, R, Partial()),
        torch.full((3,), 7.0),
        on(mesh, R, Partial()).bfloat16(),
    ]
    parameters = [on(mesh, R, R), on(mesh, R, S), on(mesh, R, R), torch.ones(3), on(mesh, R, R)]
    found, anywhere = PartialGradients(parameters)(gradients, parameters)
    # One for each type, along the axis that is partial, with who has a gradient.
    assert [(ranks, len(sent), sent.dtype) for ranks, sent in world.calls] == [
        ([0, 1], 10, torch.float32),
        ([0, 1], 5, torch.bfloat16),
    ]
    assert [tuple(part.shape) for part in found] == [(2, 2), (2, 2), (2, 2), (3,), (2, 2)]
    assert found[3] is gradients[3]
    assert anywhere.tolist() == [True, False, True, False, True]
    # The user's gradients are still what they were.
    assert gradients[0].placements == (R, Partial())


def test_a_process_without_a_partial_gradient_adds_zeros(world):
    world.start(4)
    mesh = init_device_mesh("cpu", (2, 2))
    parameters = [on(mesh, R, R), on(mesh, R, R), on(mesh, S, R)]
    total = PartialGradients(parameters)
    total([on(mesh, Partial(), Partial()), None, None], parameters)
    # Over the whole mesh, once.
    assert world.agreed == [[0, 2], [0, 1]]
    found, anywhere = total([None, on(mesh, R, R), None], parameters)
    assert world.agreed == [[0, 2], [0, 1]]
    assert [ranks for ranks, _ in world.calls] == [[0, 2], [0, 1]] * 2
    assert [sent.tolist() for _, sent in world.calls] == [[1.0] * 5] * 2 + [[0.0] * 5] * 2
    assert found[0].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert found[1].tolist() == [[1.0, 1.0], [1.0, 1.0]]
    assert found[2] is None
    assert anywhere.tolist() == [False, False, False]


def test_a_gradient_that_is_whole_at_last_is_not_added_up(world):
    world.start(2)
    mesh = init_device_mesh("cpu", (2,))
    parameters = [on(mesh, R)]
    total = PartialGradients(parameters)
    total([on(mesh, Partial())], parameters)
    found, _ = total([on(mesh, R)], parameters)
    # Another process may have none, and wait.
    assert world.calls[1][1].tolist() == [0.0] * 5
    assert found[0].tolist() == [[1.0, 1.0], [1.0, 1.0]]


@pytest.mark.parametrize(("rank", "rows"), [(0, [0, 1]), (2, [4]), (3, [])])
def test_a_whole_tensor_is_shared_out_without_communication(world, rank, rows):
    world.start(4, rank)
    mesh = init_device_mesh("cpu", (4,))
    tensor = torch.arange(5.0)
    like = shared_out(torch.zeros(5), on(mesh, S))
    part = shared_out(tensor, like)
    assert local(part).tolist() == rows
    assert part.shape == (5,)
    assert shared_out(tensor, torch.zeros(5)) is tensor
    assert shared_out(part, like) is part
    assert world.calls == []


def test_the_blocks_of_a_container_are_sharded_not_the_container(monkeypatch):
    """FSDP2 refuses containers without a forward pass."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first = torch.nn.Linear(2, 2)
            self.layers = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in range(2))
            self.act = torch.nn.ReLU()
            self.heads = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 1)})

    model, blocks = Model(), []
    monkeypatch.setattr(shards, "fully_shard", blocks.append)
    shards.shard_model(model)
    expected = [model.first, *model.layers, model.heads["a"], model]
    assert [id(block) for block in blocks] == [id(block) for block in expected]
