"""Moments in eight bits are the same codes, bit for bit, on any number of processes."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from steadygrad.optim import checks
from tests.distributed.optim_models import CODED, FLOAT32, feed, whole
from tests.distributed.ranks import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
# Uneven rows, rows of two blocks, empty shards, and a vector that has no codes.
SHAPES = {"uneven": (5, 300), "empty": (1, 70), "vector": (7,), "cube": (3, 2, 40)}
LAYOUTS = {
    2: {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]},
    4: {"rows": [Shard(0)], "hybrid": [Replicate(), Shard(0)], "twice": [Shard(0), Shard(0)]},
}
# Rows are cut, or shared out by two axes.
CUT = ("columns", "twice")
MODES = {"lans-8bit": "fused", "lamb-8bit": "foreach", "scaled_adam-8bit": "fused"}


def trained(maker, mode, mesh=None, places=()):
    """States and weights after some steps."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, shape in SHAPES.items():
        p = torch.randn(shape, generator=draw)
        if mesh is not None:
            rows = [Shard(0) if p.ndim < 2 and place == Shard(1) else place for place in places]
            p = distribute_tensor(p, mesh, rows, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(p))
    optimizer = maker(model.parameters(), **{mode: True})
    feed(model, optimizer, range(9))
    return {
        f"{name} {what}": whole(value)
        for name, p in model.named_parameters()
        for what, value in {**optimizer.state[p], "weight": p}.items()
        if value.ndim
    }


def compared(rank, world):
    """Of each kind: states in eight bits, those that differ, whether weights do, and warnings."""
    found = {}
    for name, maker in CODED.items():
        wide = FLOAT32[name.removesuffix("-8bit")]
        for layout, places in LAYOUTS[world].items():
            mesh = init_device_mesh("cpu", (2, 2) if len(places) > 1 else (world,))
            checks.warn_once.cache_clear()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                here = trained(maker, MODES[name], mesh, places)
            # Where rows are cut it is the optimizer in float32.
            expected = trained(wide if layout in CUT else maker, MODES[name])
            codes = [key for key, value in here.items() if value.dtype is torch.uint8]
            unlike = [key for key in codes if not torch.equal(here[key], expected[key])]
            weights = [f"{key} weight" for key in SHAPES]
            off = max(float((here[key] - expected[key]).abs().max()) for key in weights)
            said = [w for w in caught if "8-bit" in str(w.message)]
            found[f"{name} {layout}"] = [len(codes), unlike, off < 1e-6, len(said)]
    return found


@pytest.mark.parametrize("world", [2, 4])
def test_codes_are_those_of_one_process(world, tmp_path):
    for found in on_ranks(world, compared, tmp_path):
        for key, row in found.items():
            is_cut = key.split()[1] in CUT
            assert row == [0 if is_cut else 12, [], True, int(is_cut)], key
