"""Processes that differ where they must not are noticed; a fault of one hangs no other."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.distributed.ranks import on_ranks
from tests.unit.balance.problems import Scaler, draw, go_back, mass_of

pytestmark = pytest.mark.distributed

ITEMS, STEPS = 3, 3
WEIGHTS = {"a": 1.0, "b": 2.0}


def step(balancer, rank=0, call="fork", **options):
    """One step of losses by the balancer's names; the error it raises, or None."""
    y = draw(2, 5, seed=rank).requires_grad_()
    seen = y * 1
    losses = lambda ys: {k: (i * ys[k]).square().sum() for i, k in enumerate(ys, 1)}
    try:
        go_back(balancer, seen, losses, call, **options)
    except InputError as error:
        return str(error)
    return None


def mass(balancer):
    return mass_of(balancer).tolist()


class Halves:
    """An aggregator of inner products."""

    factor = 0.5

    def gramian_weighting(self, products):
        return products.new_full((len(products),), self.factor)


class Doubles(Halves):
    factor = 2.0


def called(returned):
    """The options of a call, if an event returned any."""
    return returned if isinstance(returned, dict) else {}


def other_states(rank, call):
    """A state or loss scale changed by one process alone, after one step of all."""
    fresh = LossBalancer(WEIGHTS).state_dict()
    events = {
        "load": lambda b: b.load_state_dict(fresh),
        "load between micro-batches": lambda b: b.load_state_dict(fresh),
        "reset": lambda b: b.reset(),
        "end_step": lambda b: b.end_step(),
        "weights": lambda b: b.set_weights({"a": 3.0}),
        "number": lambda b: {"grad_scale": 8.0},
        "scaler": lambda b: {"grad_scale": Scaler(8.0)},
        "same scaler": lambda b: {"grad_scale": Scaler(1.0)},
        "accumulation_steps": lambda b: {"accumulation_steps": 2},
    }
    found = {}
    for name, event in events.items():
        # In between no average has moved yet.
        two = name in ("end_step", "load between micro-batches")
        balancer = LossBalancer(WEIGHTS, accumulation_steps=1 + two)
        step(balancer, rank, call)
        agreed = balancer.metrics["disagreement"].item()
        changed = called(event(balancer)) if rank == 0 else {}
        before = {k: v.tolist() for k, v in balancer.state_dict().items()}
        error = step(balancer, rank, call, **changed)
        kept = before == {k: v.tolist() for k, v in balancer.state_dict().items()}
        if rank == 1:
            changed = called(event(balancer))
        last = step(balancer, rank, call, **changed)
        found[name] = error, kept, last, (agreed, balancer.metrics["disagreement"].item())
    return found


# What the error names.
DIFFERS = {
    "load": "total of 'a'",
    "load between micro-batches": "pooled of 'a'",
    "reset": "total of 'a'",
    "end_step": "total of 'a'",
    "weights": "weight of 'a'",
    "number": "loss scale",
    "scaler": "loss scale",
    "same scaler": "`grad_scale` being a scaler",
    "accumulation_steps": "loss scale",
}


def whole_and_broken_numbers(rank, call):
    """Losses and states of narrow types."""
    found = []
    narrow = LossBalancer(WEIGHTS)
    state = {k: v.float() if v.is_floating_point() else v for k, v in narrow.state_dict().items()}
    narrow.load_state_dict(state, assign=True)
    for balancer in (LossBalancer(WEIGHTS).float(), narrow):
        y = draw(2, 5, seed=rank).requires_grad_()
        losses = {} if rank else {"a": y.square().sum(), "b": y.sum()}
        balancer.backward(losses, y)
        found.append(mass(balancer))
    return found


def handed_zeros(rank, call):
    """Gradient of the second tensor on a process with a loss of the first one alone."""
    leaves = [draw(2, 5, seed=i).requires_grad_() for i in range(2)]
    y, balancer = [leaf * 1 for leaf in leaves], LossBalancer(WEIGHTS)
    rules = [lambda ys: {"a": ys["a"][0].sum()}, lambda ys: {"b": ys["b"][1].sum()}]
    some = rules[: rank + 1]
    go_back(balancer, y, lambda ys: {k: v for rule in some for k, v in rule(ys).items()}, call)
    return [None if leaf.grad is None else leaf.grad.abs().sum().item() for leaf in leaves]


def other_names(rank, call):
    """Names, or their number, that one process has for itself; and then the same ones."""
    found = []
    for weights in (
        {"a": 1.0, "c" if rank else "b": 2.0},
        {"a": 1.0, **({"b": 1.0} if rank else {})},
    ):
        balancer = LossBalancer(weights)
        found.append((step(balancer, rank, call), sum(mass(balancer))))
    balancer = LossBalancer(WEIGHTS if rank else dict(reversed(WEIGHTS.items())))
    found.append((step(balancer, rank, call), sum(mass(balancer))))
    combined = LossBalancer(WEIGHTS, combine=Doubles() if rank else Halves())
    found.append((step(combined, rank, call), sum(mass(combined))))
    return found, step(LossBalancer(WEIGHTS), rank, call)


def other_options(rank, call):
    """Options that one process was made with."""
    found = {}
    options = {
        "total_norm": 2.0,
        "ema_decay": 0.5,
        "accumulation_steps": 2,
        "eps": 1e-3,
        "lag": True,
        "balance_grads": False,
        "monitor": True,
        "per_batch_item": False,
        "batch_independent": True,
    }
    for name, value in options.items():
        balancer = LossBalancer(WEIGHTS, **({name: value} if rank else {}))
        found[name] = step(balancer, rank, call), sum(mass(balancer))
    return found


class TwoOutputs(nn.Module):
    """A trunk with two ends, of which the second one's loss may be missing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.wave, self.latent = (nn.Linear(4, 4).double() for _ in range(3))

    def forward(self, x):
        inner = self.trunk(x).tanh()
        return {"wave": self.wave(inner), "latent": self.latent(inner)}


def nest_losses(ys, rank, step):
    """Rank 0 has no loss of the second tensor in every second step."""
    found = {"a": ys["a"]["wave"].square().mean()}
    if rank or step % 2 == 0:
        found["b"] = ys["b"]["latent"].abs().mean() * 30
    return found


def joined_losses(ys, rank, step):
    """The mean over both processes of each one's losses, of which a missing one counts as zero."""
    losses = {}
    for r in range(2):
        rows = slice(r * ITEMS, (r + 1) * ITEMS)
        own = {k: {n: t[rows] for n, t in nest.items()} for k, nest in ys.items()}
        for k, loss in nest_losses(own, r, step).items():
            losses[k] = losses.get(k, 0.0) + loss / 2
    return losses


def nest_run(call, rank=None):
    """The model's parameters after some steps, on one of two processes or alone on all items."""
    model = TwoOutputs()
    wrapped = model if rank is None else DistributedDataParallel(model)
    balancer = LossBalancer(WEIGHTS, process_group=None if rank is None else "all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        x = draw(2 * ITEMS, 4, seed=i)
        y = wrapped(x if rank is None else x[rank * ITEMS : (rank + 1) * ITEMS])
        losses = joined_losses if rank is None else nest_losses
        go_back(balancer, y, partial(losses, rank=rank, step=i), call)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def everything(rank, world):
    calls = ("fork", "backward")
    return {
        "names": [other_names(rank, call) for call in calls],
        "options": [other_options(rank, call) for call in calls],
        "states": [other_states(rank, call) for call in calls],
        "numbers": [whole_and_broken_numbers(rank, call) for call in calls],
        "zeros": [handed_zeros(rank, call) for call in calls],
        "nests": [nest_run(call, rank) for call in calls],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return on_ranks(2, everything, tmp_path_factory.mktemp("agreement"))


def test_other_names_are_refused_on_every_process(runs):
    for found in runs:
        for refused, mended in found["names"]:
            for error, counted in refused:
                assert "options" in error
                assert "Remedy" in error
                assert counted == 0
            assert ["combine=Halves" in refused[-1][0], "combine=Doubles" in refused[-1][0]] in (
                [True, False],
                [False, True],
            )
            # Made alike, they agree.
            assert mended is None


def test_other_options_are_refused_before_the_first_step_counts(runs):
    for found in runs:
        for by_name in found["options"]:
            for name, (error, counted) in by_name.items():
                assert name in error
                assert counted == 0


def test_states_and_loss_scales_that_differ_are_refused_and_count_nothing(runs):
    for found in runs:
        for by_name in found["states"]:
            for name, (error, kept, last, disagreement) in by_name.items():
                assert DIFFERS[name] in error, name
                assert kept, name
                assert last is None, name
                assert disagreement == [False, True], name


def test_the_same_numbers_of_another_type_are_the_same(runs):
    for found in runs:
        assert found["numbers"] == [[[1.0, 1.0]] * 2] * 2


def test_a_tensor_without_a_loss_on_this_process_is_handed_zeros(runs):
    for rank, found in enumerate(runs):
        for first, second in found["zeros"]:
            assert first > 0
            assert second > 0 if rank else second == 0.0


def test_an_output_without_a_loss_on_one_process_keeps_nobody_waiting(runs):
    for call, *by_rank in zip(
        ("fork", "backward"), *(found["nests"] for found in runs), strict=True
    ):
        expected = nest_run(call)
        for parameters in by_rank:
            # Sums over processes in another order.
            assert parameters == pytest.approx(expected, abs=1e-12), call
