"""Options of a balancer: attributes that may be set, attributes that refuse, copies and pickles."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    WEIGHTS,
    averages_of,
    draw,
    gradient_handed_on,
    losses_of,
    mass_of,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731

OPTIONS = {
    "balance_grads": False,
    "total_norm": 3.0,
    "ema_decay": 0.25,
    "eps": 1e-3,
    "lag": True,
    "monitor": True,
    "per_batch_item": False,
    "batch_independent": True,
    "grad_scale": 4.0,
    "accumulation_steps": 2,
}


def three_steps(balancer):
    return torch.stack([gradient_handed_on(balancer, make, s * draw(4, 7)) for s in (1, 5, 2)])


def test_options_are_read_as_they_were_given():
    balancer = LossBalancer(WEIGHTS, process_group=None, combine=Triple(), **OPTIONS)
    for name, value in OPTIONS.items():
        assert getattr(balancer.options, name) == value
    assert balancer.ranks.members is None
    assert isinstance(balancer.aggregator, Triple)


class Triple(nn.Module):
    """An aggregator that is a module, as TorchJD's are."""

    def gramian_weighting(self, products):
        return torch.full_like(products[0], 3.0)


@pytest.mark.parametrize("name", [*OPTIONS, "weights", "combine", "aggregator", "process_group"])
@pytest.mark.parametrize("combine", [None, Triple()])
def test_none_can_be_changed_and_none_is_ignored(name, combine):
    """Least of all by a module, which torch would register beside it."""
    balancer = LossBalancer(WEIGHTS, combine=combine)
    before, members = gradient_handed_on(balancer, make, draw(4, 7)), list(balancer._modules)
    for value in (OPTIONS.get(name), nn.Linear(1, 1)):
        with pytest.raises(InputError, match=f"`{name}`"):
            setattr(balancer, name, value)
    assert list(balancer._modules) == members
    torch.testing.assert_close(
        gradient_handed_on(balancer, make, draw(4, 7)), before, rtol=1e-11, atol=1e-14
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 1) for name in ("balance_grads", "per_batch_item", "batch_independent")),
        ("lag", "yes"),
        ("monitor", None),
        ("total_norm", 0.0),
        ("ema_decay", 2),
        ("eps", -1.0),
        ("accumulation_steps", 0),
        ("weights", {"a.b": 1.0}),
        ("weights", {3: 1.0}),
    ],
)
def test_each_is_checked(name, value):
    with pytest.raises(InputError, match=name):
        LossBalancer(**{"weights": WEIGHTS, name: value})


@pytest.mark.parametrize("name", ["forward", "type", "step", "a/b", "", "é b"])
def test_a_loss_may_have_any_other_name(name):
    balancer, twin = (LossBalancer({name: 2.0}) for _ in range(2))
    gradient_handed_on(balancer, lambda ys: {name: ys[name].sum()}, draw(4, 7))
    twin.load_state_dict(balancer.state_dict())
    assert torch.equal(averages_of(twin), averages_of(balancer))
    assert f"state.loss_{name}" in balancer.state_dict()


def test_weights_without_names_are_refused():
    with pytest.raises(InputError, match="weights"):
        LossBalancer(WEIGHTS).set_weights(3)


def built_on_meta(**options):
    with torch.device("meta"):
        return LossBalancer(WEIGHTS, **options)


def spoil(module):
    """Fills memory as if nobody had written to it."""
    for buffer in module.buffers():
        buffer.copy_(torch.full_like(buffer, 77))


@CALLS
@pytest.mark.parametrize("by", ["balancer", "modules"])
def test_built_on_meta(call, by):
    """`modules`: as FSDP does, each module that has state of its own."""
    balancer = built_on_meta(ema_decay=0.5)
    assert all(buffer.is_meta for buffer in balancer.buffers())
    balancer.to_empty(device="cpu")
    spoil(balancer)
    if by == "balancer":
        balancer.reset()
    else:
        for module in balancer.modules():
            if list(module.buffers(recurse=False)):
                module.reset_parameters()
    fresh = LossBalancer(WEIGHTS, ema_decay=0.5)
    for key, value in fresh.state_dict().items():
        assert torch.equal(balancer.state_dict()[key], value), key
    for seed in range(3):
        got, expected = (
            gradient_handed_on(b, make, draw(4, 7, seed=seed), call) for b in (balancer, fresh)
        )
        assert torch.equal(got, expected)


def test_a_state_fills_what_was_built_on_meta():
    whole = LossBalancer(WEIGHTS)
    whole.set_weights({"adv": 9.0})
    three_steps(whole)
    balancer = built_on_meta().to_empty(device="cpu")
    spoil(balancer)
    balancer.load_state_dict(whole.state_dict())
    assert torch.equal(three_steps(balancer), three_steps(whole))


@CALLS
def test_on_meta_it_says_what_to_do(call):
    y = draw(4, 7).requires_grad_()
    with pytest.raises(NotImplementedError, match="to_empty"):
        built_on_meta().fork(y) if call == "fork" else built_on_meta().backward({"l1": y.sum()}, y)
    assert y.grad is None


def test_reset_begins_anew_with_the_weights_of_now():
    balancer = LossBalancer(WEIGHTS, accumulation_steps=2)
    three_steps(balancer)
    balancer.set_weights({"l1": 3.0})
    balancer.reset()
    fresh = LossBalancer({**WEIGHTS, "l1": 3.0}, accumulation_steps=2)
    assert balancer.weights == fresh.weights
    assert torch.equal(three_steps(balancer), three_steps(fresh))


def test_saved_weights_win_as_a_saved_learning_rate_does():
    old = LossBalancer(WEIGHTS)
    three_steps(old)
    new = LossBalancer({"l1": 5.0, "l2": 5.0, "adv": 5.0})
    new.load_state_dict(old.state_dict())
    assert new.weights == WEIGHTS
    new.set_weights({"adv": 5.0})
    assert new.weights == {**WEIGHTS, "adv": 5.0}


def test_a_loss_that_is_added_starts_afresh_and_one_that_is_gone_is_forgotten():
    old = LossBalancer(WEIGHTS)
    three_steps(old)
    new = LossBalancer({"feat": 7.0, "adv": 1.0, "l1": 1.0})
    with pytest.raises(RuntimeError, match=r"Missing.*loss_feat.*\n.*Unexpected.*loss_l2"):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(old.state_dict(), strict=False)
    # Of those that were there the saved weight, of the new one its own.
    assert new.weights == {"feat": 7.0, "adv": 4.0, "l1": 1.0}
    assert mass_of(new)[0] == 0
    places = [list(WEIGHTS).index(k) for k in ("adv", "l1")]
    assert torch.equal(averages_of(new)[1:], averages_of(old)[places])
    with_feat = lambda ys: {  # noqa: E731
        "feat": ys["feat"].square().mean(),
        **losses_of({k: ys[k] for k in ("adv", "l1")}, TARGET),
    }
    assert torch.isfinite(gradient_handed_on(new, with_feat, draw(4, 7))).all()
    assert mass_of(new)[0] == 1
    again = LossBalancer(dict(new.weights))
    again.load_state_dict(new.state_dict())
    assert torch.equal(averages_of(again), averages_of(new))


def test_left_out_counts_micro_batches():
    balancer = LossBalancer(WEIGHTS, accumulation_steps=3)
    broken = lambda ys: {**make(ys), "l2": ys["l2"].sum() * torch.nan}  # noqa: E731
    for losses in (broken, make, broken):
        gradient_handed_on(balancer, losses, draw(4, 7))
    assert balancer.metrics["nonfinite_l2"].item() == 2
    assert mass_of(balancer).tolist() == [1.0] * 3


@dataclass
class Output:
    audio: torch.Tensor
    note: str = "kept"


@dataclass(frozen=True)
class Pair:
    """A dataclass with one inside."""

    first: Output
    second: torch.Tensor


@CALLS
def test_a_dataclass_is_balanced_like_a_dict(call):
    """As Hugging Face's outputs are; what `scale` and `noise` take, too."""
    found = []
    for wrap in (
        lambda a, b: Pair(Output(a), b),
        lambda a, b: {"first": {"audio": a}, "second": b},
    ):
        first, second = draw(4, 7).requires_grad_(), draw(4, 2, seed=1).requires_grad_()
        y, balancer = wrap(first * 1, second * 1), LossBalancer({"a": 1.0, "b": 2.0})
        ys = balancer.fork(y) if call == "fork" else dict.fromkeys(balancer.weights, y)
        if isinstance(y, Pair):
            assert type(ys["a"]) is Pair
            assert ys["a"].first.note == "kept"
            audio, other = ys["a"].first.audio, ys["b"].second
        else:
            audio, other = ys["a"]["first"]["audio"], ys["b"]["second"]
        losses = {"a": audio.square().mean(), "b": 100 * other.abs().mean()}
        sum(losses.values()).backward() if call == "fork" else balancer.backward(losses, y)
        found.append((first.grad, second.grad))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # Half of the second one's share, by their weights.
    norms = [gradient.norm(dim=1).mean().item() for gradient in found[0]]
    assert norms[0] / norms[1] == pytest.approx(0.5)


def test_inside_of_a_model_loading_is_as_strict_as_torch_is_told():
    model = nn.ModuleDict({"balancer": LossBalancer(WEIGHTS)})
    twin = nn.ModuleDict({"balancer": LossBalancer({"adv": 1.0, "x": 2.0})})
    with pytest.raises(RuntimeError, match="loss_x"):
        twin.load_state_dict(model.state_dict())
    twin.load_state_dict(model.state_dict(), strict=False)
    assert twin["balancer"].weights == {"adv": 4.0, "x": 2.0}
