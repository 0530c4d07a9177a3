"""Options of a balancer: attributes that may be set, attributes that refuse, copies and pickles."""

import copy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from steadygrad import LossBalancer
from steadygrad._checks import InputError
from tests.unit.balance.problems import (
    WEIGHTS,
    draw,
    gradient_handed_on,
    losses_of,
)

CALLS = pytest.mark.parametrize("call", ["backward", "fork"])
TARGET = draw(4, 7, seed=1)
make = lambda ys: losses_of(ys, TARGET)  # noqa: E731

LIVE = {
    "balance_grads": False,
    "total_norm": 3.0,
    "ema_decay": 0.25,
    "eps": 1e-3,
    "lag": True,
    "grad_scale": 4.0,
    "accumulation_steps": 2,
}


def three_steps(balancer):
    return torch.stack([gradient_handed_on(balancer, make, s * draw(4, 7)) for s in (1, 5, 2)])


@pytest.mark.parametrize("name", LIVE)
@pytest.mark.parametrize("copied", [False, True])
def test_what_is_set_later_is_as_if_set_at_first(name, copied):
    later, first = LossBalancer(WEIGHTS), LossBalancer(WEIGHTS, **{name: LIVE[name]})
    if copied:
        later = copy.deepcopy(later)
    setattr(later, name, LIVE[name])
    assert getattr(later, name) == getattr(first, name) == LIVE[name]
    got = three_steps(later)
    assert torch.equal(got, three_steps(first))
    assert not torch.equal(got, three_steps(LossBalancer(WEIGHTS)))


def test_monitor_is_heard():
    balancer = LossBalancer(WEIGHTS)
    balancer.monitor = True
    three_steps(balancer)
    assert "cosine_l1_adv" in balancer.metrics
    balancer.monitor = False
    three_steps(balancer)
    assert "cosine_l1_adv" not in balancer.metrics


def test_options_read_as_given():
    options = {**LIVE, "monitor": True, "per_batch_item": False, "batch_independent": True}
    balancer = LossBalancer(WEIGHTS, process_group=None, combine=torch.nanmean, **options)
    for name, value in options.items():
        assert getattr(balancer, name) == value
    assert balancer.process_group is None
    assert balancer.combine is torch.nanmean
    twin = copy.deepcopy(balancer)
    twin.total_norm = 7.0
    assert (twin.total_norm, balancer.total_norm) == (7.0, 3.0)


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("balance_grads", 1, "`balance_grads` should be of type bool"),
        ("lag", "yes", "`lag` should be of type bool"),
        ("monitor", None, "`monitor` should be of type bool"),
        ("total_norm", 0.0, "total_norm"),
        ("ema_decay", 2, "ema_decay"),
        ("eps", -1.0, "eps"),
        ("grad_scale", "auto", "grad_scale"),
        ("accumulation_steps", 0, "accumulation_steps"),
    ],
)
def test_what_is_set_is_checked(name, value, match):
    balancer = LossBalancer(WEIGHTS)
    before = getattr(balancer, name)
    with pytest.raises(InputError, match=match):
        setattr(balancer, name, value)
    assert getattr(balancer, name) == before
    with pytest.raises(InputError, match=match):
        LossBalancer(WEIGHTS, **{name: value})


@pytest.mark.parametrize("name", ["per_batch_item", "batch_independent"])
def test_flags_of_the_norm_are_checked_too(name):
    with pytest.raises(InputError, match=f"`{name}` should be of type bool"):
        LossBalancer(WEIGHTS, **{name: 0})


@pytest.mark.parametrize(
    ("name", "value", "remedy"),
    [
        ("weights", {"l1": 1.0}, "set_weights"),
        ("per_batch_item", False, "a new balancer"),
        ("batch_independent", True, "a new balancer"),
        ("combine", "UPGrad", "load_state_dict"),
        ("process_group", None, "load_state_dict"),
    ],
)
def test_what_cannot_be_changed_says_so(name, value, remedy):
    balancer = LossBalancer(WEIGHTS)
    before = getattr(balancer, name)
    with pytest.raises(InputError, match=f"`{name}`.*Remedy: .*{remedy}"):
        setattr(balancer, name, value)
    assert getattr(balancer, name) == before


def test_weights_without_names_are_refused():
    with pytest.raises(InputError, match="map names to numbers"):
        LossBalancer(WEIGHTS).set_weights(3)


def test_names_whose_metrics_would_be_one():
    """cosine_a_b_c would be that of a_b with c and that of a with b_c."""
    names = {"a": 1.0, "b_c": 1.0, "a_b": 1.0, "c": 1.0}
    with pytest.raises(InputError, match=r"2 pairs whose metric would be 'cosine_a_b_c'.*rename"):
        LossBalancer(names, monitor=True)
    balancer = LossBalancer(names)
    with pytest.raises(InputError, match="cosine_a_b_c"):
        balancer.monitor = True
    assert balancer.monitor is False


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
    """`modules`: as FSDP does, each module that has state of its own, in any order."""
    balancer = built_on_meta(ema_decay=0.5)
    assert all(buffer.is_meta for buffer in balancer.buffers())
    balancer.to_empty(device="cpu")
    spoil(balancer)
    if by == "balancer":
        balancer.reset_parameters()
    else:
        for module in balancer.modules():
            if module is not balancer and list(module.buffers(recurse=False)):
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
    with pytest.raises(InputError, match=r"meta.*to_empty.*reset_parameters"):
        built_on_meta().fork(y) if call == "fork" else built_on_meta().backward({"l1": y.sum()}, y)
    assert y.grad is None


def test_reset_parameters_begins_anew_with_the_weights_of_now():
    balancer = LossBalancer(WEIGHTS, accumulation_steps=2)
    three_steps(balancer)
    balancer.set_weights({"l1": 3.0})
    balancer.reset_parameters()
    fresh = LossBalancer({**WEIGHTS, "l1": 3.0}, accumulation_steps=2)
    assert balancer.weights == fresh.weights
    assert balancer.metrics == {}
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
    with pytest.raises(InputError, match=r"\['adv', 'feat', 'l1'\].*strict=False"):
        new.load_state_dict(old.state_dict())
    new.load_state_dict(old.state_dict(), strict=False)
    # Of those that were there the saved weight, of the new one its own.
    assert new.weights == {"feat": 7.0, "adv": 4.0, "l1": 1.0}
    mass, value = new.core.averages.steps.mass, new.core.averages.steps.value()
    assert mass[0] == 0
    places = [WEIGHTS_ORDER.index(k) for k in ("adv", "l1")]
    assert torch.equal(value[1:], old.core.averages.steps.value()[places])
    with_feat = lambda ys: {  # noqa: E731
        "feat": ys["feat"].square().mean(),
        **losses_of({k: ys[k] for k in ("adv", "l1")}, TARGET),
    }
    assert torch.isfinite(gradient_handed_on(new, with_feat, draw(4, 7))).all()
    assert new.core.averages.steps.mass[0] == 1
    again = LossBalancer(dict(new.weights))
    again.load_state_dict(new.state_dict())
    assert torch.equal(again.core.averages.steps.value(), new.core.averages.steps.value())


WEIGHTS_ORDER = list(WEIGHTS)


def test_left_out_counts_micro_batches():
    balancer = LossBalancer(WEIGHTS, accumulation_steps=3)
    broken = lambda ys: {**make(ys), "l2": ys["l2"].sum() * torch.nan}  # noqa: E731
    for losses in (broken, make, broken):
        gradient_handed_on(balancer, losses, draw(4, 7))
    assert balancer.left_out["nonfinite"]["l2"].item() == 2
    assert balancer.core.averages.steps.mass.tolist() == [1.0] * 3


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


@pytest.mark.parametrize("losses", [torch.ones(()), torch.ones(3), [1.0], 0.5, None])
def test_losses_without_names_are_refused(losses):
    y = draw(4, 7).requires_grad_()
    match = rf"`losses` should map names to losses. Found a {type(losses).__name__}. Remedy"
    with pytest.raises(InputError, match=match):
        LossBalancer(WEIGHTS).backward(losses, y)


def test_inside_of_a_model_other_losses_are_refused():
    """There torch does not say whether loading is strict."""
    model = nn.ModuleDict({"balancer": LossBalancer(WEIGHTS)})
    twin = nn.ModuleDict({"balancer": LossBalancer({"adv": 1.0, "x": 2.0})})
    with pytest.raises(InputError, match=r"\['adv', 'x'\].*called by itself"):
        twin.load_state_dict(model.state_dict(), strict=False)
    twin["balancer"].load_state_dict(model["balancer"].state_dict(), strict=False)
    assert twin["balancer"].weights == {"adv": 4.0, "x": 2.0}
    with pytest.raises(InputError, match="called by itself"):
        twin["balancer"].load_state_dict(model["balancer"].state_dict())
