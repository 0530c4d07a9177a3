"""torchtitan's own configuration, overrides, optimizers and checkpoints, with our optimizers."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.fsdp import fully_shard

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.contracts.problems import assert_same
from tests.distributed.ranks import on_ranks
from tests.integrations.by_hand import RANKS
from tests.integrations.pages import after, blocks, run

pytest.importorskip("torchtitan", reason="group integrations")
with warnings.catch_warnings():
    # Of much that is no matter of these tests.
    warnings.simplefilter("ignore")
    import torchtitan.trainer  # noqa: F401
    from torchtitan.components.optimizer import ParamGroupConfig
    from torchtitan.config.override import apply_overrides
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

from steadygrad.integrations.torchtitan import SteadygradOptimizers

PAGE = "torchtitan.md"
TARGET = "steadygrad.integrations.torchtitan.optimizers"
KINDS = {"LANS": LANS, "LAMB": LAMB, "ScaledAdam": ScaledAdam}
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed"),
]


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))


def configured(name, implementation="for-loop", **options):
    """torchtitan's own configuration with the override applied as its trainer does it."""
    config = llama3_debugmodel()
    config.optimizer.implementation = implementation
    config.override.imports = [(TARGET, {"name": name, **options})]
    apply_overrides(config.override, config)
    return config.optimizer


def train(model, optimizer, steps, seed=1):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(
    ("name", "implementation"),
    [("LANS", "for-loop"), ("LAMB", "foreach"), ("ScaledAdam", "fused")],
)
def test_an_override_makes_the_optimizer_that_a_loop_by_hand_uses(name, implementation):
    model, config = make_model(), configured(name, implementation, lr=1e-2)
    assert type(config) is SteadygradOptimizers.Config
    twin = copy.deepcopy(model)
    container = config.build(model_parts=[model])
    train(model, container, 5)
    options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    train(twin, KINDS[name](twin.named_parameters(), lr=1e-2, **options), 5)
    assert [type(each) for each in container] == [KINDS[name]]
    assert_same(model.parameters(), twin.parameters())


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match="`name`"):
        configured("LANZ", lr=1e-2)


def test_the_pages_code_configures():
    found = run(after(blocks(PAGE, "diff")[0]), {"config": llama3_debugmodel()}, PAGE)
    apply_overrides(found["config"].override, found["config"])
    assert found["config"].optimizer.param_groups[0].optimizer_name == "LANS"
    names = {"config": llama3_debugmodel(), "ParamGroupConfig": ParamGroupConfig}
    config = run(blocks(PAGE, "python")[0], names, PAGE)["config"]
    config.optimizer.implementation = "for-loop"
    apply_overrides(config.override, config)
    container = config.optimizer.build(model_parts=[make_model()])
    assert [type(each).__name__ for each in container] == ["AdamW", "LANS"]


def sharded_on_rank(rank, world, folder):
    """Each optimizer's state goes through a checkpoint to the bit; how far it is from a loop."""
    distances = []
    for name, kind in KINDS.items():
        options = {"lr": 1e-2, **({"clipping_scale": 2.0} if name == "ScaledAdam" else {})}
        whole, again, plain = (make_model() for _ in range(3))
        for part in (whole, again):
            fully_shard(part)
        kept, loaded = (configured(name, **options).build(model_parts=[m]) for m in (whole, again))
        train(whole, kept, 4)
        states = {"model": whole.state_dict(), "optimizer": kept.state_dict()}
        assert {key.split(".")[0] for key in states["optimizer"]} == {"state", "param_groups"}
        save(states, checkpoint_id=f"{folder}/{name}")
        states = {"model": again.state_dict(), "optimizer": loaded.state_dict()}
        load(states, checkpoint_id=f"{folder}/{name}")
        again.load_state_dict(states["model"])
        loaded.load_state_dict(states["optimizer"])
        optimizer = kind(plain.named_parameters(), **options)
        train(plain, optimizer, 4)
        for model, each in ((whole, kept), (again, loaded), (plain, optimizer)):
            train(model, each, 4, seed=2)
        for p, q in zip(again.parameters(), whole.parameters(), strict=True):
            assert torch.equal(p.to_local(), q.to_local())
        for p, q, start in zip(
            *(m.parameters() for m in (whole, plain, make_model())), strict=True
        ):
            distances.append((p.full_tensor() - q).abs().max() / (q - start).abs().max())
    return float(max(distances))


@pytest.mark.distributed
def test_sharded_optimizers_are_those_of_a_loop_by_hand(tmp_path):
    found = on_ranks(RANKS, sharded_on_rank, tmp_path, str(tmp_path))
    # Norms over shards are added up in another order, which eight float32 steps magnify.
    assert max(found) < 1e-4
