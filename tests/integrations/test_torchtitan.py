"""torchtitan's own configuration, overrides, optimizers and checkpoints, with our optimizers."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import load, save
from torch.distributed.fsdp import fully_shard

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.distributed.ranks import on_ranks
from tests.integrations import quiet
from tests.integrations.by_hand import NoiseByHand, flat_gradient
from tests.integrations.pages import after, blocks, run

quiet.importorskip(
    "torchtitan", "torchtitan.trainer", "torchtitan.models.llama3.config_registry",
    "torchtitan.components.optimizer", "torchtitan.config.override",
)  # fmt: skip

from torchtitan.components.optimizer import OptimizersContainer, ParamGroupConfig  # noqa: E402
from torchtitan.config.override import apply_overrides  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402

from steadygrad.integrations.torchtitan import SteadygradOptimizers  # noqa: E402

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
        x = torch.randn(16, 6, generator=generator)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
@pytest.mark.parametrize("name", KINDS)
def test_an_override_makes_the_optimizer_that_a_loop_by_hand_uses(name, implementation):
    model, config = make_model(), configured(name, implementation, lr=1e-2)
    assert type(config) is SteadygradOptimizers.Config
    twin = copy.deepcopy(model)
    container = config.build(model_parts=[model])
    train(model, container, 5)
    options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    train(twin, KINDS[name](twin.named_parameters(), lr=1e-2, **options), 5)
    assert [type(each) for each in container] == [KINDS[name]]
    for found, wanted in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", KINDS)
def test_the_flat_state_goes_through_a_checkpoint_to_the_bit(name, tmp_path):
    whole, options = make_model(), {"lr": 1e-2}
    if name == "ScaledAdam":
        options["clipping_scale"] = 2.0
    kept = configured(name, **options).build(model_parts=[whole])
    train(whole, kept, 4)
    flat = kept.state_dict()
    assert {key.split(".")[0] for key in flat} == {"state", "param_groups"}
    save({"model": whole.state_dict(), "optimizer": flat}, checkpoint_id=tmp_path, no_dist=True)
    again = make_model()
    loaded = configured(name, **options).build(model_parts=[again])
    states = {"model": again.state_dict(), "optimizer": loaded.state_dict()}
    load(states, checkpoint_id=tmp_path, no_dist=True)
    again.load_state_dict(states["model"])
    loaded.load_state_dict(states["optimizer"])
    train(whole, kept, 4, seed=2)
    train(again, loaded, 4, seed=2)
    for found, wanted in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_groups_choose_by_name_beside_torchtitans_own():
    config = llama3_debugmodel()
    config.optimizer = OptimizersContainer.Config(
        param_groups=[
            ParamGroupConfig(
                pattern="bias$", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-3}
            ),
            ParamGroupConfig(pattern=".*", optimizer_name="LANS", optimizer_kwargs={"lr": 1e-2}),
        ],
        implementation="for-loop",
    )
    config.override.imports = [TARGET]
    apply_overrides(config.override, config)
    container = config.optimizer.build(model_parts=[make_model()])
    assert [type(each).__name__ for each in container] == ["AdamW", "LANS"]


def test_an_unknown_name_is_refused():
    with pytest.raises(InputError, match=r"`name` should be one of .* did you mean 'LANS'"):
        configured("LANZ", lr=1e-2)


def test_the_pages_code_configures():
    found = run(after(blocks(PAGE, "diff")[0]), {"config": llama3_debugmodel()}, PAGE)
    apply_overrides(found["config"].override, found["config"])
    assert found["config"].optimizer.param_groups[0].optimizer_name == "LANS"
    names = {"config": llama3_debugmodel(), "ParamGroupConfig": ParamGroupConfig}
    config = run(blocks(PAGE, "python")[0], names, PAGE)["config"]
    apply_overrides(config.override, config)
    assert type(config.optimizer) is SteadygradOptimizers.Config
    assert [group.optimizer_name for group in config.optimizer.param_groups] == ["AdamW", "LANS"]


def sharded_on_rank(rank, world, folder):
    """Flat state to the bit, and the distance from a loop by hand, of each optimizer."""
    found = {}
    for name, kind in KINDS.items():
        options = {"lr": 1e-2, **({"clipping_scale": 2.0} if name == "ScaledAdam" else {})}
        parts = [make_model() for _ in range(3)]
        whole, again, plain = parts
        for part in (whole, again):
            fully_shard(part)
        kept, loaded = (configured(name, **options).build(model_parts=[part]) for part in parts[:2])
        train(whole, kept, 4)
        states = {"model": whole.state_dict(), "optimizer": kept.state_dict()}
        save(states, checkpoint_id=f"{folder}/{name}")
        states = {"model": again.state_dict(), "optimizer": loaded.state_dict()}
        load(states, checkpoint_id=f"{folder}/{name}")
        again.load_state_dict(states["model"])
        loaded.load_state_dict(states["optimizer"])
        optimizer = kind(plain.named_parameters(), **options)
        train(plain, optimizer, 4)
        for model, each in ((whole, kept), (again, loaded), (plain, optimizer)):
            train(model, each, 4, seed=2)
        pairs = zip(again.parameters(), whole.parameters(), strict=True)
        rows = zip(whole.parameters(), plain.parameters(), make_model().parameters(), strict=True)
        distances = [
            float(((p.full_tensor() - q).abs().max() / (q - start).abs().max()).detach())
            for p, q, start in rows
        ]
        found[name] = {
            "same": all(torch.equal(p.to_local(), q.to_local()) for p, q in pairs),
            "distance": max(distances),
        }
    return found


@pytest.mark.distributed
def test_sharded_optimizers_are_those_of_a_loop_by_hand(tmp_path):
    found = on_ranks(RANKS, sharded_on_rank, tmp_path, str(tmp_path))
    for row in found:
        assert {name: each["same"] for name, each in row.items()} == dict.fromkeys(KINDS, True)
        # Norms over shards are added up in another order, which eight float32 steps magnify.
        assert max(each["distance"] for each in row.values()) < 1e-4


def train_on_rank(rank, world):
    """A loop as torchtitan's: sums over labels, over all labels, and gradients added up."""
    model = make_model().double()
    fully_shard(model)
    model.set_gradient_divide_factor(1.0)
    noise = NoiseScale(model)
    for step in range(STEPS):
        counts, total = sizes(step, world)
        for micro, labels in enumerate(counts[rank]):
            x = inputs(step, rank, micro, labels)
            model.set_requires_gradient_sync(micro == MICROS - 1)
            noise.samples(1, weight=torch.tensor(labels * world / total), loss_scale=1 / world)
            (model(x).square().mean(1).sum() / total).backward()
        noise.step(grad_scale=1.0)
        model.zero_grad()
    return {"value": float(noise.estimate().value), "altered": int(noise.altered)}


STEPS, MICROS, RANKS = 4, 3, 2


def sizes(step, world):
    """Labels of each micro-batch of each rank, and of all."""
    counts = [
        [2 + (step + rank + 2 * micro) % 5 for micro in range(MICROS)] for rank in range(world)
    ]
    return counts, sum(map(sum, counts))


def inputs(step, rank, micro, labels):
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    return torch.randn(labels, 6, generator=generator, dtype=torch.float64)


@pytest.mark.distributed
def test_the_pages_weights_are_right_where_gradients_are_added_up(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path)
    model, expected = make_model().double(), NoiseByHand()
    for step in range(STEPS):
        counts, total = sizes(step, RANKS)
        gradients, weights = [], []
        for rank, row in enumerate(counts):
            for micro, labels in enumerate(row):
                model.zero_grad()
                model(inputs(step, rank, micro, labels)).square().mean().backward()
                gradients.append(flat_gradient([*model.parameters()]))
                weights.append(labels / total)
        expected.step(gradients, weights, [1] * len(weights))
    assert [row["altered"] for row in found] == [0] * RANKS
    assert found[0]["value"] == pytest.approx(expected.value, rel=1e-6)
