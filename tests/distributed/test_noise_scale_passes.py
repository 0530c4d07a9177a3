"""On several processes `NoiseScale` finds its own micro-batches, and what was done to gradients."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from steadygrad.noise import NoiseScale
from steadygrad.scale import LayerwiseGradScaler
from tests.distributed.ranks import in_turn, on_ranks
from tests.distributed.training import MICRO, FsdpSync, Nothing, loss_of, make_model, sample

pytestmark = pytest.mark.distributed

MICROS, STEPS = 3, 3
POLICIES = {
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 sums": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
}


class Checkpointed(nn.Module):
    """Layers that are called again in the backward pass."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        for layer in self.inner:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def ddp(options):
    model = make_model()
    if "checkpointed" in options:
        model = Checkpointed(model)
    model = DistributedDataParallel(model)
    return model, lambda last: Nothing() if last else model.no_sync()


def fsdp(options):
    policy = next((POLICIES[name] for name in options if name in POLICIES), None)
    model = make_model() if policy is None else make_model().float()
    layers = model[0], model[3]
    if "checkpointed" in options:
        model = Checkpointed(model)
    for module in (*layers, model):
        fully_shard(module, **({} if policy is None else {"mp_policy": policy}))
    if "kept" in options:
        model.set_reshard_after_backward(False)
    if "every pass reduced" in options:
        return model, Nothing
    return model, lambda last: FsdpSync(model, last)


class Run:
    """A few steps of one kind of model on one rank, and what a `NoiseScale` made of them."""

    def __init__(self, kind, options, rank, way="found", steps=STEPS, alter=None, told=None):
        self.model, self.accumulate = {"ddp": ddp, "fsdp": fsdp}[kind](options)
        self.dtype = torch.float32 if options & set(POLICIES) else torch.float64
        self.scaler = None
        if "layerwise" in options:
            self.scaler = LayerwiseGradScaler(
                self.model, {"**.3": 2.0**9}, init_scale=2.0**5, growth_interval=2
            )
        samples = MICRO if way == "found" else None
        self.noise = NoiseScale(self.model, samples=samples, scaler=self.scaler)
        self.way, self.rank = way, rank
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        for step in range(steps):
            self.accumulate_gradients(step)
            if alter is not None:
                alter(self.model)
            self.noise.step(grad_scale=told)
            if self.scaler is not None:
                self.scaler.step(optimizer)
                self.scaler.update()
            elif alter is None:
                optimizer.step()
            optimizer.zero_grad()

    def accumulate_gradients(self, step):
        for micro in range(MICROS):
            x, y = (t.to(self.dtype) for t in sample(step, micro, self.rank))
            with self.accumulate(micro == MICROS - 1):
                loss = loss_of(self.model, x, y) / MICROS
                if self.scaler is not None:
                    loss = self.scaler.scale(loss)
                if self.way == "contexts":
                    with self.noise.microbatch(MICRO):
                        loss.backward()
                else:
                    loss.backward()

    def results(self):
        ring = self.noise.state_dict()["ring"][:STEPS]
        return [ring.tolist(), self.noise.skipped.item(), self.noise.altered.item()]


CASES = {
    "ddp": ("ddp", set()),
    "ddp, checkpointed": ("ddp", {"checkpointed"}),
    "ddp, layerwise": ("ddp", {"layerwise"}),
    "fsdp": ("fsdp", set()),
    "fsdp, every pass reduced": ("fsdp", {"every pass reduced"}),
    "fsdp, kept gathered": ("fsdp", {"kept"}),
    "fsdp, checkpointed": ("fsdp", {"checkpointed"}),
    "fsdp, bf16": ("fsdp", {"bf16"}),
    "fsdp, bf16 sums": ("fsdp", {"bf16 sums"}),
    "fsdp, layerwise": ("fsdp", {"layerwise"}),
    "fsdp, kept gathered, layerwise": ("fsdp", {"layerwise", "kept"}),
}


def both_ways(rank, world):
    return {
        name: [Run(kind, options, rank, way).results() for way in ("contexts", "found")]
        for name, (kind, options) in CASES.items()
    }


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found, by function."""
    functions = [both_ways, altered, summed, unusual]
    return in_turn(2, functions, tmp_path_factory.mktemp("passes"))


@pytest.mark.parametrize("name", CASES)
def test_found_passes_are_those_of_contexts_to_the_bit(name, results):
    for rank in results["both_ways"]:
        contexts, found = rank[name]
        assert found == contexts
        assert torch.isfinite(torch.tensor(found[0])).all()
        assert found[1:] == [0, 0]


@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp, kept gathered"])
def test_scales_by_layer_change_nothing(kind, results):
    for rank in results["both_ways"]:
        plain, scaled = (torch.tensor(rank[name][1][0]) for name in (kind, f"{kind}, layerwise"))
        assert torch.equal(plain, scaled)


def halve(model):
    for p in model.parameters():
        p.grad *= 0.5


def clip(model):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def add(model):
    for p in model.parameters():
        p.grad += torch.ones_like(p.grad)


def add_up(model):
    for p in model.parameters():
        p.grad *= 2


ALTERATIONS = (clip, halve, add, add_up)


def altered(rank, world):
    found = []
    for name in ("ddp", "fsdp", "fsdp, bf16"):
        for alter in ALTERATIONS:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                run = Run(*CASES[name], rank, alter=alter)
            messages = [str(w.message) for w in caught if "noise.altered" in str(w.message)]
            found.append([run.noise.altered.item(), len(messages)])
    return found


def test_alterations_are_noticed_on_every_rank(results):
    for rank in results["altered"]:
        for counts in rank:
            assert counts == [STEPS, 1]


def summed(rank, world):
    """Gradients of a sum over processes, the loss divided by their number or not."""
    runs = [
        Run("fsdp", set(), rank, alter=lambda model: None),
        Run("fsdp", set(), rank, alter=add_up, told=2.0),
    ]
    return [run.results() for run in runs]


def test_a_reduction_that_adds_up_can_be_told(results):
    for averaged, added in results["summed"]:
        assert added == averaged
        assert added[1:] == [0, 0]


def many_steps(rank, world):
    return [Run(*CASES[name], rank, steps=250).results()[1:] for name in ("ddp", *LONG)]


LONG = ("fsdp, checkpointed", "fsdp, bf16", "fsdp, bf16 sums")


@pytest.mark.slow
def test_no_false_alarm_in_a_thousand_steps(tmp_path):
    assert on_ranks(2, many_steps, tmp_path) == [[[0, 0]] * 4] * 2


def wrapped(kind):
    if kind is None:
        return make_model()
    if kind == "ddp":
        return DistributedDataParallel(make_model())
    return fsdp(set())[0]


def one_rank_is_empty(kind, rank):
    """The second rank's samples are all masked; its passes run all the same."""
    model = wrapped(kind)
    noise = NoiseScale(model)
    for step in range(STEPS):
        for micro in range(2):
            x, y = sample(step, micro, rank)
            noise.samples(0 if rank else MICRO)
            (loss_of(model, x, y) * (rank == 0) / 2).backward()
        noise.step()
        model.zero_grad()
    return noise.state_dict()["ring"][:STEPS].tolist()


def one_rank_repeats(kind, rank):
    """The first rank goes through one forward pass twice, from the second step on."""
    model = wrapped(kind)
    noise = NoiseScale(model, samples=MICRO)
    for step in range(STEPS):
        for micro in range(2):
            loss = loss_of(model, *sample(step, micro, rank)) / 2
            if step and not rank:
                torch.autograd.backward(loss / 2, retain_graph=True)
                loss = loss / 2
            loss.backward()
        noise.step()
        model.zero_grad()
    return noise.skipped.item()


def parts_of_one_loss(kind, rank):
    """Two losses, one after the other; whether each rank says so, and to the bit."""
    model = wrapped(kind)
    noise = NoiseScale(model, samples=MICRO)
    for step in range(40):
        for micro in range(2):
            loss = loss_of(model, *sample(step, micro, rank))
            (loss if micro else loss.sqrt()).backward()
        noise.step()
        model.zero_grad()
    return noise.estimate().unlike.item(), noise._witness.cosines.tolist()


def unusual(rank, world):
    return {
        "empty": [one_rank_is_empty(kind, rank) for kind in ("ddp", "fsdp")],
        "repeats": one_rank_repeats("ddp", rank),
        "unlike": [parts_of_one_loss(kind, rank) for kind in ("ddp", "fsdp")],
    }


def test_what_one_rank_notices_all_of_them_say(results):
    ranks = results["unusual"]
    assert ranks[0] == ranks[1]
    alone = torch.tensor(one_rank_is_empty(None, 0))
    for ring in ranks[0]["empty"]:
        # 1e-9: other sums of the same float64 numbers.
        assert torch.allclose(torch.tensor(ring), alone, rtol=1e-9)
    assert ranks[0]["repeats"] == STEPS - 1
    assert [unlike for unlike, _ in ranks[0]["unlike"]] == [True, True]
