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
from steadygrad.shards import (
    PackedSum,
    PartialGradients,
    first_shard,
    is_sharded,
    local,
    shared_out,
)

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


def three_axes():
    return init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("copy", "part", "tp"))


def of(ranks, *names):
    """A mesh of some processes."""
    return DeviceMesh("cpu", ranks, mesh_dim_names=names or ("a",))


def flattened():
    """As FSDP2 lays out a parameter that tensor parallelism has split before."""
    mesh = three_axes()
    flat = mesh["copy", "part"]._flatten("dp")
    return [on(flat, S), on(DeviceMesh._concatenate([flat, mesh["tp"]]), S, Shard(1))]


def of_one_mesh(*placements):
    mesh = three_axes()
    return [on(mesh[name] if name else mesh, *some) for name, some in placements]


def sent(world):
    return [tensor.tolist() for _, tensor in world.calls]


def test_without_processes_a_sum_is_the_value_itself():
    columns = torch.tensor([[1.0, 2.0]])
    total = PackedSum([torch.ones(2), torch.ones(3)])
    assert total.collectives == 0
    assert total.of_all(columns) is columns
    assert not is_sharded(columns)
    assert local(columns) is columns


ALL = (*range(8),)
GRID, TURNED = [[0, 1], [2, 3]], [[0, 2], [1, 3]]
EIGHT = [[0, 1], [2, 3], [4, 5], [6, 7]]
# The world's size, this rank, the tensors, a column of each; what is sent to which processes, with
# the flag at the end; and the sums. Rank 5 is at (1, 0, 1) of the mesh of three axes.
LAYOUTS = {
    "shards of one mesh go to all of it": (
        (8, 3), lambda: [on(of([*ALL]), S), on(of([*ALL]), S)], [1.0, 2.0],
        {ALL: [1.0, 2.0, 0.0]}, [1.0, 2.0],
    ),
    # With rank 7 it makes up the shards, and they have two copies of the whole tensor.
    "copies elsewhere are not asked": (
        (8, 5), lambda: of_one_mesh(("", (R, S, R)), ("", (R, R, R))), [1.0, 4.0],
        {(5, 7): [1.0, 2.0, 0.0]}, [1.0, 2.0],
    ),
    # A finding in a plain tensor must reach the copies of the others. Two shards among eight
    # processes: four copies of each value.
    "copies are asked beside plain tensors": (
        (8, 5), lambda: [*of_one_mesh(("", (R, S, R))), torch.ones(3)], [1.0, 2.0],
        {ALL: [0.25, 0.0]}, [0.25, 2.0],
    ),
    # FSDP alone and tensor parallelism alone, each on its part of the mesh, and both. Who is
    # elsewhere along the other axis may hold another tensor, and has a column of its own: rank 5
    # is the first along `part` and the second along `tp`.
    "other axes of a mesh travel together with shares": (
        (8, 5),
        lambda: of_one_mesh(("part", (S,)), ("tp", (S,)), (("part", "tp"), (S, Shard(1)))),
        [1.0, 1.0, 1.0],
        {(4, 5, 6, 7): [0.0, 1.0, 1.0, 0.0, 1.0, 0.0]}, [1.0, 1.0, 1.0],
    ),
    # A part's tensor may differ from another part's, and with it what is found in it: a column
    # for each part, a quarter of each of four copies, the flag.
    "copies are asked beside tensors on a part of the mesh": (
        (8, 5), lambda: of_one_mesh(("tp", (S,)), (("copy", "tp"), (R, R))), [1.0, 3.0],
        {(0, 1, 4, 5): [0.0, 1.0, 0.75, 0.0]}, [1.0, 0.75],
    ),
    **{
        f"parts of a group go by the order of its mesh, rank {rank}": (
            (4, rank), lambda: [on(of(TURNED, "c", "d")["d"], S), on(of(GRID, "a", "b"), S, S)],
            [1.0, 1.0], {(0, 1, 2, 3): [*columns, 1.0, 0.0]}, [1.0, 1.0],
        )
        for rank, columns in enumerate([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    },
    "parts in the middle do not fill a group": (
        (4, 1), lambda: [on(of([0, 1, 2, 3]), S), on(of([1, 2]), S)], [1.0, 1.0],
        {(0, 1, 2, 3): [1.0, 0.0], (1, 2): [1.0, 0.0]}, [1.0, 1.0],
    ),
    "two of three do not fill a group": (
        (3, 1), lambda: [on(of([0, 1, 2]), S), on(of([0, 1]), S)], [1.0, 1.0],
        {(0, 1, 2): [1.0, 0.0], (0, 1): [1.0, 0.0]}, [1.0, 1.0],
    ),
    # Two copies of the first.
    "processes among another's travel with them": (
        (8, 2),
        lambda: [on(of(EIGHT, "x", "y"), S, R), on(of([*ALL]), S), on(of(EIGHT, "x", "y"), S, S)],
        [1.0, 1.0, 1.0], {ALL: [0.5, 1.0, 1.0, 0.0]}, [0.5, 1.0, 1.0],
    ),
    "a flattened axis beside the axis it lies next to": (
        (8, 0), flattened, [1.0, 1.0], {ALL: [1.0, 0.0, 1.0, 0.0]}, [1.0, 1.0],
    ),
    "unrelated meshes make a collective each": (
        (8, 0), lambda: [on(of([0, 1, 2, 3]), S), on(of([0, 4]), S), on(of([0, 1, 2, 3]), S)],
        [1.0, 2.0, 3.0],
        {(0, 1, 2, 3): [1.0, 3.0, 0.0], (0, 4): [2.0, 0.0]}, [1.0, 2.0, 3.0],
    ),
    "a share has all the digits of the sum": (
        (6, 0), lambda: [on(of([[0, 1, 2], [3, 4, 5]], "x", "y"), S, R),
                         on(of([[0, 1, 2], [3, 4, 5]], "x", "y"), S, S)],
        [1.0, 1.0], {ALL[:6]: [1 / 3, 1.0, 0.0]}, [pytest.approx(1 / 3), 1.0],
    ),
    "one process needs no collective": (
        (2, 0), lambda: [on(of([[0, 1]], "x", "y"), S, R)], [1.0], {}, [1.0],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_what_a_packed_sum_sends_to_which_processes(world, case):
    place, tensors, columns, expected, sums = LAYOUTS[case]
    world.start(*place)
    total = PackedSum(tensors())
    result = total.of_all(torch.tensor([columns]))
    assert {tuple(ranks): row.tolist() for ranks, row in world.calls} == expected
    assert total.collectives == len(world.calls) == len(expected)
    assert result.tolist() == [sums]
    assert result.dtype == torch.float32


def test_the_members_of_a_new_group_have_agreed_on_its_name(world):
    """Along one axis, then the other; before that, on whether they hold several kinds."""
    world.start(8, 5)
    placements = ("part", (S,)), ("tp", (S,)), (("part", "tp"), (S, Shard(1)))
    assert not PackedSum(of_one_mesh(*placements)).is_uniform
    assert world.agreed[-2:] == [[5, 7], [4, 5]]


def test_columns_that_a_process_does_not_work_on_travel_as_zeros(world):
    world.start(2)
    mesh, flag = of([0, 1]), torch.tensor(True)
    total = PackedSum([on(mesh, S)] * 3)
    index = torch.tensor([2, 0])
    columns = torch.tensor([[5.0, 4.0], [2.0, 3.0]])
    (sums,), is_up, _ = total([index], [columns], 2, flag)
    # Each row ends in the column of the flag.
    assert sent(world) == [[4.0, 0.0, 5.0, 1.0, 3.0, 0.0, 2.0, 0.0]]
    assert torch.equal(sums, columns)
    assert is_up
    assert total([], [], 1)[0] == []
    assert sent(world)[1] == [0.0, 0.0, 0.0, 0.0]


def test_means_over_processes_that_may_differ(world):
    """A sum over a tensor of all four, one that two parts hold, and a plain one."""
    world.start(8, 0)
    mesh = three_axes()
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


def test_parts_beside_each_other_pass_on_what_they_find(world):
    """Nothing public leads from one to the other: two sums, one after the other."""
    world.start(8, 5)
    mesh = three_axes()
    total = PackedSum([on(mesh["part"], S), on(mesh["tp"], S)])
    index, columns, terms = torch.arange(2), torch.ones(1, 2), torch.ones(1, 2)
    _, is_up, means = total([index], [columns], 1, torch.tensor(True), [(slice(0, 1), terms)], 1)
    assert total.collectives == 2
    assert [ranks for ranks, _ in world.calls] == [[5, 7], [4, 5]]
    # Column, flag and joint sum: of a tensor of one pair the mean over the other pairs.
    assert sent(world) == [[1.0, 1.0, 1.0]] * 2
    assert is_up
    assert means.tolist() == [1.0]


def test_a_group_is_made_once_in_a_world(world, monkeypatch):
    made, original = [], dist.new_group
    monkeypatch.setattr(
        dist, "new_group", lambda ranks, **more: made.append(ranks) or original(ranks, **more)
    )
    for count in (1, 2):
        world.start(8, 5)
        mesh = three_axes()
        before = len(made)
        for _ in range(3):
            PackedSum([on(mesh, R, S, S)])
            # All processes have one already.
            PackedSum([on(mesh, S, S, S)])
        assert len(made) == before + 1
        # The groups of a world that has ended are of no use in the next.
        assert made.count([4, 5, 6, 7]) == count
        dist.destroy_process_group()


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
    # One that is whole at last is not added up; another process may have none, and wait.
    found, _ = total([on(mesh, R, R), None, None], parameters)
    assert [sent.tolist() for _, sent in world.calls[4:]] == [[0.0] * 5] * 2
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


def test_rows_of_the_first_shard_lie_alike_in_the_whole(world):
    world.start(2, rank=1)
    mesh = of([0, 1])
    assert first_shard(on(mesh, R)) == ((2, 2), True)
    assert first_shard(on(mesh, S)) == ((2, 2), False)
    assert first_shard(on(mesh, Shard(1))) is None
