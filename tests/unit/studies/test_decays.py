"""Optimizers show which of their betas is the second moment's decay."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from steadygrad._checks import InputError
from steadygrad.optim import LAMB, LANS, ScaledAdam
from steadygrad.studies.learning_rate import Rate, RateSetter, second_moment_places
from tests.unit.studies.test_trainer import make_task


class Rule(Optimizer):
    """One with betas; ``move`` says how a step moves its averages."""

    betas = (0.9, 0.999)

    def __init__(self, params, lr=1e-3, betas=None, weight_decay=0.1):
        super().__init__(
            params, {"lr": lr, "betas": betas or self.betas, "weight_decay": weight_decay}
        )

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {name: torch.zeros_like(p) for name in ("m", "v", "other")}
                    state["t"] = 0
                state["t"] += 1
                self.move(p.grad, state, *group["betas"])
                p.sub_(state["m"] / (state["v"].sqrt() + 1e-8), alpha=group["lr"])


class Adan(Rule):
    betas = (0.98, 0.92, 0.99)

    def move(self, g, state, b1, b2, b3):
        difference = g - state["other"] if state["t"] > 1 else torch.zeros_like(g)
        state["m"].lerp_(g + b2 * difference, 1 - b1)
        state["v"].lerp_((g + b2 * difference) ** 2, 1 - b3)
        state["other"].copy_(g)


class AdEMAMix(Rule):
    betas = (0.9, 0.999, 0.9999)

    def move(self, g, state, b1, b2, b3):
        state["m"].lerp_(g, 1 - b1)
        state["v"].lerp_(g**2, 1 - b2)
        state["other"].lerp_(g, 1 - b3)


class Backwards(Rule):
    betas = (0.999, 0.9)

    def move(self, g, state, b2, b1):
        state["m"].lerp_(g, 1 - b1)
        state["v"].lerp_(g**2, 1 - b2)


class AdaBelief(Rule):
    def move(self, g, state, b1, b2):
        state["m"].lerp_(g, 1 - b1)
        state["v"].lerp_((g - state["m"]) ** 2, 1 - b2)


class Adopt(Rule):
    """The first second moment is that of the first gradient."""

    def move(self, g, state, b1, b2):
        state["v"].lerp_(g**2, 1 - b2 if state["t"] > 1 else 1)
        state["m"].lerp_(g, 1 - b1)


class Lion(Rule):
    betas = (0.9, 0.99)

    def move(self, g, state, b1, b2):
        state["m"].lerp_(g, 1 - b2)


class Two(Rule):
    """Two second moments: which one is meant cannot be told."""

    betas = (0.9, 0.99, 0.999)

    def move(self, g, state, b1, b2, b3):
        state["v"].lerp_(g**2, 1 - b2)
        state["other"].lerp_(g**2, 1 - b3)


class Broken(Rule):
    def move(self, g, state, b1, b2):
        raise KeyError("what another program may do")


FOUND = {
    torch.optim.Adam: 1,
    torch.optim.AdamW: 1,
    torch.optim.NAdam: 1,
    torch.optim.RAdam: 1,
    torch.optim.Adamax: 1,
    LANS: 1,
    LAMB: 1,
    ScaledAdam: 1,
    Adan: 2,
    AdEMAMix: 1,
    Backwards: 0,
    AdaBelief: 1,
    Adopt: 1,
    Lion: None,
    Two: None,
    Broken: None,
    torch.optim.SparseAdam: None,
    torch.optim.SGD: None,
}


@pytest.mark.parametrize(("kind", "place"), FOUND.items(), ids=lambda one: str(one))
def test_the_place_of_the_second_moments_decay(kind, place):
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    model[0].weight.requires_grad_(False)
    groups = [{"params": list(part.parameters())} for part in model]
    optimizer = kind(groups, lr=1e-3)
    hooked = []
    optimizer.register_step_pre_hook(lambda *_: hooked.append(1))
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict(), torch.get_rng_state()))
    assert second_moment_places(optimizer) == [place, place]
    after = model.state_dict(), optimizer.state_dict(), torch.get_rng_state()
    assert str(after) == str(before)
    assert not hooked


@pytest.mark.parametrize("kind", [kind for kind in FOUND if kind is not torch.optim.SGD])
def test_it_keeps_its_half_life_and_others_stay(kind):
    place = FOUND[kind]
    optimizer = kind(nn.Linear(3, 2).parameters(), lr=1e-3)
    if place is None:
        with pytest.raises(InputError, match="`--keep-half-life`"):
            RateSetter(optimizer, make_task(), True)
        return
    group = optimizer.param_groups[0]
    task, betas = make_task(), group["betas"]
    RateSetter(optimizer, task, True)(Rate(4 * task.batch_size))
    expected = [b**4 if i == place else b for i, b in enumerate(betas)]
    assert group["betas"] == pytest.approx(expected, rel=1e-12)
