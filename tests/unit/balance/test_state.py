"""A balancer's state: saved and loaded by names, resumed, copied, built on meta."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    CALLS,
    CLOSE,
    WEIGHTS,
    assert_same_state,
    averages_of,
    draw,
    go_back,
    gradient_handed_on,
    losses_of,
    make_model,
    mass_of,
    parameters_of,
    state_of,
)


def three_steps(balancer):
    return torch.stack([gradient_handed_on(balancer, losses_of, s * draw(4, 7)) for s in (1, 5, 2)])


def make_used(**options):
    balancer = LossBalancer(WEIGHTS, **options)
    three_steps(balancer)
    return balancer


def inside_of_a_model(balancer):
    return nn.ModuleDict({"net": nn.Linear(1, 1), "balancer": balancer})


@CALLS
def test_killed_and_resumed_to_the_bit(call, tmp_path):
    """Between two micro-batches of a step of the balancer's."""

    def fresh():
        model, balancer = make_model(), LossBalancer(WEIGHTS, accumulation_steps=3)
        return model, balancer, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(parts, steps):
        model, balancer, optimizer = parts
        for step in steps:
            target = draw(6, 7, seed=50 + step) * (20 if step % 3 == 2 else 1)
            losses = lambda ys, t=target: losses_of(ys, t)
            go_back(balancer, model(draw(6, 5, seed=step)), losses, call)
            optimizer.step()
            optimizer.zero_grad()

    whole, first, second = fresh(), fresh(), fresh()
    train(whole, range(10))
    train(first, range(4))
    torch.save([part.state_dict() for part in first], tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    for part, state in zip(second, saved, strict=True):
        part.load_state_dict(state)
    train(second, range(4, 10))
    assert torch.equal(parameters_of(second[0]), parameters_of(whole[0]))
    assert_same_state(state_of(second[1]), state_of(whole[1]))


def test_weights_change_while_training():
    balancer, y = LossBalancer(WEIGHTS), draw(4, 7)
    gradient_handed_on(balancer, losses_of, y)
    balancer.set_weights({"adv": 0.5, "l2": 0})
    assert balancer.weights == {"l1": 1.0, "l2": 0.0, "adv": 0.5}
    got = gradient_handed_on(balancer, losses_of, y)
    expected = gradient_handed_on(LossBalancer(balancer.weights), losses_of, y)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    # A loss without weight is measured all the same.
    assert mass_of(balancer)[1] > 1
    # Saved weights win, as a saved learning rate does.
    twin = LossBalancer(WEIGHTS)
    twin.load_state_dict(balancer.state_dict())
    twin.set_weights({"adv": 5.0})
    assert twin.weights == {"l1": 1.0, "l2": 0.0, "adv": 5.0}


def test_a_loss_that_is_added_starts_afresh_and_one_that_is_gone_is_forgotten():
    """Loading inside of a model is as strict as torch is told."""
    old = make_used()
    new = LossBalancer({"feat": 7.0, "adv": 1.0, "l1": 1.0})
    saved = inside_of_a_model(old).state_dict()
    with pytest.raises(RuntimeError, match=r"Missing.*loss_feat.*\n.*Unexpected.*loss_l2"):
        inside_of_a_model(new).load_state_dict(saved)
    inside_of_a_model(new).load_state_dict(saved, strict=False)
    # Of those that were there the saved weight, of the new one its own.
    assert new.weights == {"feat": 7.0, "adv": 4.0, "l1": 1.0}
    assert mass_of(new)[0] == 0
    places = [list(WEIGHTS).index(k) for k in ("adv", "l1")]
    assert torch.equal(averages_of(new)[1:], averages_of(old)[places])
    gradient_handed_on(new, lambda ys: {"feat": ys["feat"].square().mean()}, draw(4, 7))
    assert mass_of(new)[0] == 1


def test_copies_are_independent_keep_their_digits_and_ask_the_same_scaler():
    scaler = GradScaler("cpu", init_scale=4.0)
    balancer = make_used(grad_scale=scaler)
    before = {name: value.clone() for name, value in balancer.state_dict().items()}
    copied = copy.deepcopy(inside_of_a_model(balancer)).half()["balancer"]
    assert copied.options.grad_scale is scaler
    for twin in (copied, pickle.loads(pickle.dumps(balancer))):
        assert_same_state(twin.state_dict(), before)
        assert torch.isfinite(gradient_handed_on(twin, losses_of, 2 * draw(4, 7))).all()
        assert not torch.equal(averages_of(twin), averages_of(balancer))
    assert_same_state(balancer.state_dict(), before)


def test_reset_begins_anew_with_the_weights_of_now():
    """In the midst of a step, too."""
    balancer = make_used(accumulation_steps=2)
    balancer.set_weights({"l1": 3.0})
    balancer.reset()
    fresh = LossBalancer({**WEIGHTS, "l1": 3.0}, accumulation_steps=2)
    assert balancer.weights == fresh.weights
    assert torch.equal(three_steps(balancer), three_steps(fresh))


def built_on_meta(weights=WEIGHTS, *, emptied=True):
    """On a device then, with memory as if nobody had written to it, unless it is to stay there."""
    with torch.device("meta"):
        balancer = LossBalancer(weights)
    if emptied:
        balancer.to_empty(device="cpu")
        for buffer in balancer.buffers():
            buffer.fill_(77)
    return balancer


@pytest.mark.parametrize("by", ["balancer", "modules"])
def test_built_on_meta(by):
    """`modules`: as FSDP does, each module that has state of its own."""
    balancer, fresh = built_on_meta(), LossBalancer(WEIGHTS)
    if by == "balancer":
        balancer.reset()
    else:
        for module in balancer.modules():
            if list(module.buffers(recurse=False)):
                module.reset_parameters()
    assert_same_state(state_of(balancer), state_of(fresh))
    assert torch.equal(three_steps(balancer), three_steps(fresh))


@pytest.mark.parametrize("assign", [True, False])
@pytest.mark.parametrize("order", [WEIGHTS, dict(reversed(WEIGHTS.items()))], ids=["same", "other"])
def test_a_state_finds_its_losses_by_name_and_fills_what_was_built_on_meta(assign, order):
    whole = make_used()
    whole.set_weights({"adv": 9.0})
    loaded = built_on_meta(order, emptied=not assign)
    state = {name: value.clone() for name, value in whole.state_dict().items()}
    loaded.load_state_dict(state, assign=assign)
    assert loaded.weights == {**WEIGHTS, "adv": 9.0}
    # And its own state goes back to where it came from.
    again = LossBalancer(WEIGHTS)
    again.load_state_dict(loaded.state_dict())
    assert torch.equal(averages_of(again), averages_of(whole))
    torch.testing.assert_close(three_steps(loaded), three_steps(whole), **CLOSE)
