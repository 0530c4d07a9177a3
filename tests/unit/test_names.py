"""Names as their author wrote them, whatever wraps the model."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from steadygrad._names import own_name
from tests.unit.nets import Net


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("wrapped", ["plain", "compiled", "ddp", "compiled ddp", "ddp of compiled"])
def test_own_name(wrapped):
    # With a submodule that is called as DDP calls the model.
    model = Net(None, module=nn.Linear(2, 2))
    for wrapper in reversed(wrapped.split(" ")):
        if wrapper == "compiled":
            model = torch.compile(model)
        if wrapper == "ddp":
            model = nn.parallel.DistributedDataParallel(model)
    names = [own_name(name, model) for name, _ in model.named_parameters()]
    assert names == ["module.weight", "module.bias"]
