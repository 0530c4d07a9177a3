"""Moments in eight bits are the same codes, bit for bit, on any number of processes."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from steadygrad.optim import base
from tests.distributed.optim_models import CODED, FLOAT32, feed, whole
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed
# Uneven rows, rows of two blocks, empty shards, and a vector that has no codes.
SHAPES = {"even": (8, 12), "uneven": (5, 300), "empty": (1, 70), "vector": (7,), "cube": (3, 2, 40)}
LAYOUTS = {
    1: {"rows": [Shard(0)]},
    2: {"rows": [Shard(0)], "columns": [Shard(1)], "copies": [Replicate()]},
    3: {"rows": [Shard(0)]},
    4: {"rows": [Shard(0)], "hybrid": [Replicate(), Shard(0)], "twice": [Shard(0), Shard(0)]},
}
# Rows are cut, or shared out by two axes.
CUT = ("columns", "twice")
MODES = {"fused": {"fused": True}, "foreach": {"foreach": True}}


def trained(makers, mode, mesh=None, places=()):
    """States and weights after four steps of each, which goes on from the state of the last."""
    draw = torch.Generator().manual_seed(0)
    model = nn.Module()
    for name, shape in SHAPES.items():
        p = torch.randn(shape, generator=draw)
        if mesh is not None:
            rows = [Shard(0) if p.ndim < 2 and place == Shard(1) else place for place in places]
            p = distribute_tensor(p, mesh, rows, src_data_rank=None)
        model.register_parameter(name, nn.Parameter(p))
    optimizer = None
    for stage, maker in enumerate(makers):
        known = optimizer and get_optimizer_state_dict(model, optimizer)
        optimizer = maker(model.parameters(), **mode)
        if known:
            set_optimizer_state_dict(model, optimizer, known)
        feed(model, optimizer, range(4 * stage, 4 * stage + 4))
    return {
        f"{name} {what}": whole(value)
        for name, p in model.named_parameters()
        for what, value in {**optimizer.state[p], "weight": p}.items()
        if value.ndim
    }


def compared(rank, world):
    """Of each kind: states in eight bits, those that differ, whether weights do, and messages."""
    found = {}
    for name, maker in CODED.items():
        for mode, options in MODES.items():
            wide = FLOAT32[name.removesuffix("-8bit")]
            coded = [maker, wide, maker, maker]
            # Where rows are cut it is the optimizer in float32.
            alone = {False: trained(coded, options), True: trained([wide] * 4, options)}
            for layout, places in LAYOUTS[world].items():
                mesh = init_device_mesh("cpu", (2, 2) if len(places) > 1 else (world,))
                base._WARNED.clear()
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    here = trained(coded, options, mesh, places)
                expected = alone[layout in CUT]
                codes = [key for key, value in here.items() if value.dtype is torch.uint8]
                unlike = [key for key in codes if not torch.equal(here[key], expected[key])]
                off = [
                    float((here[f"{key} weight"] - expected[f"{key} weight"]).abs().max())
                    for key in SHAPES
                ]
                texts = [str(warning.message) for warning in caught]
                said = [text[:65] for text in texts if "8-bit" in text]
                found[f"{name} {mode} {layout}"] = [len(codes), unlike, max(off) < 1e-6, said]
    return found


@pytest.mark.parametrize(
    "world", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4))]
)
def test_codes_are_those_of_one_process(world, tmp_path):
    said = "Expected parameters sharded once along their first dimension for "
    for found in on_ranks(world, compared, tmp_path):
        for key, row in found.items():
            is_cut = key.split()[2] in CUT
            assert row == [0 if is_cut else 16, [], True, [said] * is_cut], key
