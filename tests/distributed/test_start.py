"""``Task.start`` on two processes: from a file, and from a folder that two processes wrote."""

from dataclasses import replace

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.fsdp import fully_shard

from steadygrad.studies.deadline import Deadline
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.trainer import Trainer
from tests.distributed.test_advise import on_ranks
from tests.unit.studies.test_start import TASK, Training, make_optimizer, plain

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def write(path):
    """A checkpoint of the training, its optimizer's state sharded as well."""
    training, sharded = Training(), Training()
    state = training.optimizer.state_dict()
    model = fully_shard(sharded.model)
    optimizer = torch.optim.AdamW(model.parameters())
    for p, own in zip(model.parameters(), state["state"].values(), strict=True):
        optimizer.state[p] = {
            name: x
            if name == "step"
            else torch.distributed.tensor.distribute_tensor(x, p.device_mesh, p.placements)
            for name, x in own.items()
        }
    optimizer.param_groups[0].update(eps=1e-3)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=path)


def go_on(path, sharding="ddp"):
    """Weights, as lists, after three steps from the checkpoint."""
    task = replace(TASK, start=path, make_optimizer=make_optimizer)
    device = torch.device("cpu")
    with DistributedContext.joined(Deadline(), device, sharding) as context:
        trainer = Trainer(task, seed=0, dtype="float32", context=context)
        trainer.check_task()
        for number in range(10, 13):
            trainer.step(torch.arange(4 * number, 4 * number + 4))
        return [x.flatten().tolist() for x in trainer.state(0).model.values()]


@pytest.mark.parametrize("sharding", ["ddp", "fsdp2"])
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_two_processes_go_on_as_one_does(tmp_path, kind, sharding):
    path = tmp_path / "saved"
    plain(Training(), tmp_path / "alone")
    if kind == "folder":
        on_ranks(tmp_path / "writers", 2, write, str(path))
    else:
        path = tmp_path / "alone"
    one = go_on(tmp_path / "alone")
    for found in on_ranks(tmp_path / "ranks", 2, go_on, str(path), sharding):
        for a, b in zip(found, one, strict=True):
            # float32 sums in another order, over three steps.
            assert a == pytest.approx(b, abs=1e-6)
