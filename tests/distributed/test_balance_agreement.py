"""What processes must have alike is noticed, and what each has alone keeps nobody waiting."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.distributed.ranks import on_ranks
from tests.unit.balance.problems import draw

pytestmark = pytest.mark.distributed

ITEMS, STEPS = 3, 3
WEIGHTS = {"a": 1.0, "b": 2.0}


def step(balancer, rank=0, call="fork", **options):
    """One step of losses by the balancer's names; the error it raises, or None."""
    y = draw(2, 5, seed=rank).requires_grad_()
    seen = y * 1
    try:
        if call == "fork":
            ys = balancer.fork(seen, **options)
            sum((i * ys[k]).square().sum() for i, k in enumerate(ys, 1)).backward()
        else:
            losses = {k: (i * seen).square().sum() for i, k in enumerate(balancer.weights, 1)}
            balancer.backward(losses, seen, **options)
    except InputError as error:
        return str(error)
    return None


def mass(balancer):
    return balancer.core.averages.steps.mass.tolist()


def other_names(rank, call):
    """Names, or their number, that one process has for itself; and then the same ones."""
    found = []
    for weights in (
        {"a": 1.0, "c" if rank else "b": 2.0},
        {"a": 1.0, **({"b": 1.0} if rank else {})},
    ):
        balancer = LossBalancer(weights)
        found.append((step(balancer, rank, call), sum(mass(balancer))))
    watched = LossBalancer(WEIGHTS, monitor=rank == 1)
    found.append((step(watched, rank, call), sum(mass(watched))))
    watched.monitor = False
    return found, (step(watched, rank, call), mass(watched))


def other_options(rank, call):
    """Options that one process changes for itself, and then the other one too."""
    found = {}
    changes = {
        "weights": lambda b: b.set_weights({"a": 3.0}),
        "total_norm": lambda b: setattr(b, "total_norm", 2.0),
        "ema_decay": lambda b: setattr(b, "ema_decay", 0.5),
        "accumulation_steps": lambda b: setattr(b, "accumulation_steps", 2),
    }
    for name, change in changes.items():
        balancer = LossBalancer(WEIGHTS)
        first = step(balancer, rank, call)
        agreed = balancer.metrics["disagreement"].item()
        if rank == 0:
            change(balancer)
        error, kept = step(balancer, rank, call), mass(balancer)
        if rank == 1:
            change(balancer)
        last = step(balancer, rank, call)
        ever = balancer.metrics["disagreement"].item()
        state = {k: v.tolist() for k, v in balancer.state_dict().items()}
        found[name] = {
            "errors": (first, error, last), "agreed": (agreed, ever), "mass": kept, "state": state,
        }  # fmt: skip
    return found


def narrowed(rank, call):
    """A balancer made float32, whose second loss one process does not have."""
    balancer = nn.ModuleDict({"b": LossBalancer(WEIGHTS)}).float()["b"]
    y = draw(2, 5, seed=rank).requires_grad_()
    seen = y * 1
    if call == "fork":
        ys = balancer.fork(seen)
        (ys["a"].square().sum() + (0 if rank else ys["b"].abs().sum())).backward()
    else:
        losses = {"a": seen.square().sum()} | ({} if rank else {"b": seen.abs().sum()})
        balancer.backward(losses, seen)
    return mass(balancer)


def same_numbers(rank, call):
    """An int on one process, an equal float on the other."""
    balancer = LossBalancer(WEIGHTS, total_norm=1.0 if rank else 1)
    return step(balancer, rank, call)


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


def nest_run(call, rank=None):
    """The model's parameters after some steps, on one of two processes or alone on all items."""
    model = TwoOutputs()
    wrapped = model if rank is None else DistributedDataParallel(model)
    balancer = LossBalancer(WEIGHTS, process_group=None if rank is None else "all")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(STEPS):
        x = draw(2 * ITEMS, 4, seed=i)
        y = wrapped(x if rank is None else x[rank * ITEMS : (rank + 1) * ITEMS])
        ys = balancer.fork(y) if call == "fork" else dict.fromkeys(WEIGHTS, y)
        if rank is None:
            losses = {}
            for r in range(2):
                rows = slice(r * ITEMS, (r + 1) * ITEMS)
                own = {k: {n: t[rows] for n, t in nest.items()} for k, nest in ys.items()}
                for k, loss in nest_losses(own, r, i).items():
                    losses[k] = losses.get(k, 0.0) + loss / 2
        else:
            losses = nest_losses(ys, rank, i)
        sum(losses.values()).backward() if call == "fork" else balancer.backward(losses, y)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def everything(rank, world):
    calls = ("fork", "backward")
    return {
        "names": [other_names(rank, call) for call in calls],
        "options": [other_options(rank, call) for call in calls],
        "nests": [nest_run(call, rank) for call in calls],
        "narrowed": [narrowed(rank, call) for call in calls],
        "same numbers": [same_numbers(rank, call) for call in calls],
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    return on_ranks(2, everything, tmp_path_factory.mktemp("agreement"))


def test_other_names_are_refused_on_every_process(runs):
    for found in runs:
        for refused, mended in found["names"]:
            for error, counted in refused:
                assert "same options on every process" in error
                assert "Remedy" in error
                assert counted == 0
            assert "['a', 'b']" in refused[0][0] or "['a', 'c']" in refused[0][0]
            # Made alike, they agree.
            assert mended == [None, [1.0, 1.0]]


def test_other_options_are_refused_in_the_step_and_count_nothing(runs):
    for found in runs:
        for by_name in found["options"]:
            for name, case in by_name.items():
                first, error, last = case["errors"]
                assert first is last is None
                assert "same options on every process" in error
                assert name in error
                assert case["mass"] == [1.0, 1.0]
                assert case["agreed"] == [False, True]
    for one, other in zip(runs[0]["options"], runs[1]["options"], strict=True):
        for name, case in one.items():
            assert case["state"] == other[name]["state"]


def test_a_narrowed_balancer_keeps_nobody_waiting(runs):
    assert all(found["narrowed"] == [[1.0, 1.0]] * 2 for found in runs)


def test_equal_numbers_of_other_types_agree(runs):
    assert all(found["same numbers"] == [None, None] for found in runs)


def test_an_output_without_a_loss_on_one_process_keeps_nobody_waiting(runs):
    for call, *by_rank in zip(
        ("fork", "backward"), *(found["nests"] for found in runs), strict=True
    ):
        expected = nest_run(call)
        for parameters in by_rank:
            # Sums over processes in another order.
            assert parameters == pytest.approx(expected, abs=1e-12), call
