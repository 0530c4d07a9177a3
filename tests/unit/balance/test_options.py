"""What options change: aggregators in place of the sum, loss scales, numbers of micro-batches."""

import pytest
import torch
from torch.amp import GradScaler

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    CALLS,
    CLOSE,
    WEIGHTS,
    Aggregator,
    Scaler,
    assert_same_state,
    averages_of,
    by_products,
    changed,
    draw,
    go_back,
    gradient_handed_on,
    gradients_of,
    losses_of,
    make_model,
    mass_of,
    slope,
    state_of,
    times,
)


def rows_of(y, weights):
    """Balanced gradients, one a loss in a row, made by balancing each loss alone."""
    rows, total = [], sum(weights.values())
    for name, weight in weights.items():
        balancer = LossBalancer({name: 1.0}, total_norm=weight / total)
        rows.append(gradient_handed_on(balancer, lambda ys, k=name: losses_of({k: ys[k]}), y))
    return torch.stack(rows).flatten(1)


@CALLS
def test_an_aggregator_sees_balanced_gradients(call):
    y = draw(4, 7)
    balancer = LossBalancer(WEIGHTS, combine=Aggregator(by_products))
    got = gradient_handed_on(balancer, losses_of, y, call)
    matrix = rows_of(y, WEIGHTS)
    expected = (by_products(matrix @ matrix.T) @ matrix).view_as(y)
    torch.testing.assert_close(got, expected, **CLOSE)
    assert (got - matrix.sum(0).view_as(y)).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["UPGrad", "MGDA", "AlignedMTL", "DualProj"])
def test_torchjd(name):
    aggregation = pytest.importorskip("torchjd.aggregation", reason="of the extra torchjd")
    y = draw(4, 7)
    got = gradient_handed_on(LossBalancer(WEIGHTS, combine=name), losses_of, y)
    expected = getattr(aggregation, name)()(rows_of(y, WEIGHTS)).view_as(y)
    # The solver's own precision.
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-8)


@CALLS
@pytest.mark.parametrize(
    ("attributes", "count"),
    [({}, 2), ({"pref_vector": torch.ones(4)}, 4), ({"reset": print}, 4)],
    ids=["plain", "sized", "remembers"],
)
def test_only_losses_that_may_take_part_are_rows(attributes, count, call):
    """The host knows that one has no weight or is missing, but only the device that one is broken.

    An aggregator with a number for each row, or a memory of it, has rows of zeros for all.
    """
    mean = Aggregator(lambda products: products.new_full((len(products),), 1 / len(products)))
    for name, value in attributes.items():
        setattr(mean, name, value)
    y, weights = draw(4, 7), {**WEIGHTS, "watched": 0.0}
    some = changed(l2=lambda y: y.sum() * torch.nan, adv=None, watched=lambda y: y.square().sum())
    got = gradient_handed_on(LossBalancer(weights, combine=mean), some, y, call)
    expected = rows_of(y, {"l1": 1.0})[0].view_as(y) / count
    torch.testing.assert_close(got, expected, **CLOSE)


def test_only_losses_without_weight_give_nothing():
    """With the copy of another loss unused, which `backward` would refuse."""
    balancer = LossBalancer({"a": 1.0, "b": 0.0}, combine=Aggregator(by_products))
    source = draw(4, 7).requires_grad_()
    balancer.fork(source * 1)["b"].sum().backward()
    assert torch.equal(source.grad, torch.zeros_like(source))


def test_random_weights_do_not_depend_on_the_callers_generator():
    """So that processes agree, wherever each one's own generator stands."""

    def fresh():
        # As PCGrad does by the order it draws.
        return LossBalancer(WEIGHTS, combine=Aggregator(lambda p: torch.rand(len(p)).to(p)))

    found, y = [], draw(4, 7)
    for seed in (1, 2):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        balancer = fresh()
        found.append([gradient_handed_on(balancer, losses_of, y) for _ in range(3)])
        assert torch.equal(torch.get_rng_state(), state)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    # From the same draw the steps would differ by the averages' rounding, 1e-16.
    assert (found[0][0] - found[0][1]).abs().max() > 1e-3
    resumed = fresh()
    resumed.load_state_dict(balancer.state_dict())
    gone_on = gradient_handed_on(balancer, losses_of, y)
    assert torch.equal(gradient_handed_on(resumed, losses_of, y), gone_on)
    balancer.reset()
    assert torch.equal(gradient_handed_on(balancer, losses_of, y), found[0][0])


@CALLS
def test_the_total_is_that_of_what_is_handed_on(call):
    """Weights may turn a gradient round, and it has its share all the same."""
    y = draw(4, 7)
    turned = Aggregator(lambda products: torch.tensor([-1.0, 3.0, 1.0]).double())
    balancer = LossBalancer(WEIGHTS, combine=turned, monitor=True)
    told = {"grad_scale": 16.0, "accumulation_steps": 2}
    got = gradient_handed_on(balancer, times(8), y, call, **told)
    torch.testing.assert_close(balancer.metrics["total"], got.norm() / 8, **CLOSE)
    # Weights of 1, 2 and 4, times those of the aggregator.
    found = [balancer.metrics[f"share_after_{k}"].item() for k in WEIGHTS]
    assert found == pytest.approx([1 / 11, 6 / 11, 4 / 11])


# A loss that overflows.
BROKEN = changed(l2=lambda y: y.sum() * torch.inf)


@CALLS
@pytest.mark.parametrize("where", ["constructor", "call"])
@pytest.mark.parametrize("scale", [65536.0, torch.tensor(65536.0), Scaler(65536.0)], ids=type)
def test_a_loss_scale_scales_the_gradient_and_no_average(call, where, scale):
    plain = LossBalancer(WEIGHTS, per_batch_item=call == "fork")
    given = {"grad_scale": scale}
    told, options = (given, {}) if where == "constructor" else ({}, given)
    scaled = LossBalancer(WEIGHTS, per_batch_item=call == "fork", **told)
    for step in range(3):
        y = draw(4, 7) + step
        expected = gradient_handed_on(plain, losses_of, y, call)
        got = gradient_handed_on(scaled, times(65536), y, call, **options)
        assert torch.equal(got, 65536 * expected)  # a power of two
    # A scaler that is a module stays outside, too.
    assert_same_state(state_of(scaled), state_of(plain))


@CALLS
@pytest.mark.parametrize(
    ("scale", "combine", "sees"),
    [
        (Scaler(), None, True),
        (Scaler(), Aggregator(lambda products: products.new_ones(len(products))), True),
        # A number skips no step. A disabled scaler scales nothing.
        (2.0, None, False),
        (torch.tensor(2.0), None, False),
        (GradScaler("cpu", init_scale=2.0, enabled=False), None, False),
    ],
    ids=["scaler", "combined", "number", "tensor", "disabled"],
)
def test_only_a_scaler_is_handed_what_is_not_finite(call, scale, combine, sees):
    """It has to see an overflow, or every step from now on overflows; no aggregator hides it."""
    y, options = draw(4, 7), {"grad_scale": scale, "combine": combine}
    balancer = LossBalancer(WEIGHTS, **options)
    got = gradient_handed_on(balancer, BROKEN, y, call)
    assert got.isnan().all() if sees else got.isfinite().all()
    assert mass_of(balancer).tolist() == ([0.0] * 3 if sees else [1.0, 0.0, 1.0])
    assert torch.isfinite(gradient_handed_on(balancer, losses_of, y, call)).all()
    # Nothing of a loss without weight is in the gradient: there is nothing to skip.
    balancer = LossBalancer({**WEIGHTS, "l2": 0.0}, **options)
    assert torch.isfinite(gradient_handed_on(balancer, BROKEN, y, call)).all()
    assert mass_of(balancer).tolist() == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("ended", [False, True], ids=["whole", "ended by hand"])
def test_a_step_that_overflows_in_one_micro_batch_moves_no_average(ended):
    y, options = draw(4, 7), {"grad_scale": Scaler(), "accumulation_steps": 3}
    balancer, plain = LossBalancer(WEIGHTS, **options), LossBalancer(WEIGHTS, **options)
    for losses in (losses_of, BROKEN) if ended else (losses_of, BROKEN, losses_of):
        got = gradient_handed_on(balancer, losses, 3 * y)
        assert got.isnan().all() == (losses is BROKEN)
    if ended:
        balancer.end_step()
    assert mass_of(balancer).tolist() == [0.0] * 3
    # And the next step is one like any other.
    for _ in range(3):
        got = gradient_handed_on(balancer, losses_of, y)
        assert torch.equal(got, gradient_handed_on(plain, losses_of, y))
    assert mass_of(balancer).tolist() == [1.0] * 3


@pytest.mark.parametrize("per_item", [True, False])
def test_one_and_four_accumulation_steps_agree(per_item):
    """With lagging averages to rounding, once there are some; the averages from the start."""
    options = {"batch_independent": True, "per_batch_item": per_item, "lag": True, "eps": 0}
    results = {}
    for micro in (1, 4):
        model, balancer = make_model(), LossBalancer(WEIGHTS, **options)
        results[micro] = []
        for step in range(4):
            x, target = draw(8, 5, seed=step), draw(8, 7, seed=50 + step)
            for a, b in zip(x.split(8 // micro), target.split(8 // micro), strict=True):
                part = times(1 / micro, lambda ys, t=b: losses_of(ys, t))
                go_back(balancer, model(a), part, accumulation_steps=micro)
            # The first step has its own norms.
            assert gradients_of(model).isfinite().all()
            if step > 0:
                results[micro].append(gradients_of(model))
            model.zero_grad()
        results[micro].append(averages_of(balancer))
    for one, four in zip(results[1], results[4], strict=True):
        torch.testing.assert_close(four, one, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("loaded", [False, True])
@pytest.mark.parametrize("by_hand", [False, True])
def test_a_step_cut_short_ends_with_what_it_has(loaded, by_hand):
    """As at the end of an epoch: told of fewer micro-batches, or ended by hand.

    Also one that was open when it was saved.
    """
    balancer, y = LossBalancer({"a": 1}), draw(4, 7)
    balancer.end_step()
    gradient_handed_on(balancer, slope(0.25), y, accumulation_steps=4)
    if loaded:
        saved, balancer = balancer.state_dict(), LossBalancer({"a": 1})
        balancer.load_state_dict(saved)
    assert mass_of(balancer).item() == 0
    if by_hand:
        gradient_handed_on(balancer, slope(0.75), y, accumulation_steps=4)
        balancer.end_step()
        balancer.end_step()
    else:
        gradient_handed_on(balancer, slope(3.0), y, accumulation_steps=1)
    assert mass_of(balancer).item() == 1
    # The mean of slopes 1 and 3, which micro-batches divide, for items of seven numbers.
    assert averages_of(balancer).item() == pytest.approx(2 * 7**0.5)
    # The next step is whole again.
    for _ in range(2):
        assert mass_of(balancer).item() == 1
        gradient_handed_on(balancer, slope(0.5), y, accumulation_steps=2)
    assert mass_of(balancer).item() == pytest.approx(1.999)
