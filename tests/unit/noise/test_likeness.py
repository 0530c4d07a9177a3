"""Parts that are no micro-batches of one loss are told by what first and last ones differ in."""

import copy

import pytest
import torch
from torch import nn

from steadygrad.noise import NoiseScale
from steadygrad.noise.witness import note_cosine, parts_differ
from tests.unit.noise.training_loop import losses, make

bce = nn.functional.binary_cross_entropy_with_logits


def drawn(shift):
    x = torch.randn(8, 3) + shift
    return x, bce, torch.full((8, 1), float(shift > 0))


def discriminator(model):
    """The original loop: a sample is a pair, and each of its halves has a pass of its own."""
    for shift in (0.5, -0.5):
        x, loss, y = drawn(shift)
        yield loss(model(x)[:, :1], y)


def forward_passes_of_the_same_samples(model):
    for _ in range(2):
        x = torch.randn(8, 3)
        yield (model(x)[:, 0] - x[:, 0]).square().mean() / 2
        # Read anew: the same tensor would be known.
        yield 0.3 * (model(x.clone())[:, 0] - x[:, 0]).abs().mean() / 2


def penalty_of_gradients(model):
    x = torch.randn(8, 3, requires_grad=True)
    yield bce(model(x), (x > 0).float()[:, :2])
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    yield slope.square().sum(1).mean()


def micro_batches(model, noise, sizes=(8, 8, 8)):
    """Ordinary ones; what is drawn is far from normal, and one of a hundred samples is huge."""
    for n in sizes:
        noise.samples(n)
        x = torch.randn(n, 3).exp() * (1 + 30 * (torch.rand(n, 1) < 0.01))
        yield (model(x)[:, 0] - x[:, 0]).square().mean() / len(sizes)


def ragged(model, noise):
    yield from micro_batches(model, noise, (8, 5, 1))


def trained(parts, steps=120, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    noise = NoiseScale(model, decay=1.0, samples=8, drift=False, **options)
    for _ in range(steps):
        optimizer.zero_grad()
        arguments = (model, noise) if parts in (micro_batches, ragged) else (model,)
        for loss in parts(*arguments):
            loss.backward()
        noise.step()
        optimizer.step()
    return noise


@pytest.mark.parametrize(
    "parts",
    [
        discriminator,
        forward_passes_of_the_same_samples,
        penalty_of_gradients,
    ],
)
def test_parts_of_one_loss_are_not_taken_for_micro_batches(parts):
    noise = trained(parts)
    got = noise.estimate()
    assert not got.resolved
    assert (got.low.item(), got.high.item()) == (0.0, float("inf"))
    assert got.value.isnan()
    assert "microbatch" in got.as_dict()["reason"]
    assert all(not group.resolved for group in got.by_group.values())
    other = NoiseScale(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)))
    other.load_state_dict(copy.deepcopy({**noise.state_dict(), "ring": other._ring * 1}))
    assert other.estimate().unlike
    noise.reset()
    assert not noise.estimate().unlike


@pytest.mark.parametrize("parts", [micro_batches, ragged])
def test_micro_batches_are_alike(parts):
    got = trained(parts, steps=400).estimate()
    assert (got.unlike.item(), got.reason) == (False, None)


def test_samples_that_come_in_a_fixed_order_are_noticed():
    """Each step's first micro-batch is the same: the spread of parts is that of two samples."""
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    for _ in range(30):
        model.zero_grad()
        for a, b in zip(x.split(5), y.split(5), strict=True):
            (losses(model, a, b).mean() / 2).backward()
        noise.step()
    assert noise.estimate().unlike


def test_equal_parts_differ_by_rounding_alone():
    torch.manual_seed(0)
    model, x = nn.Linear(64, 1), torch.randn(8, 64)
    noise = NoiseScale(model, samples=8)
    for _ in range(30):
        model.zero_grad()
        for factor in (1, 3):
            ((model(x.clone()) * factor).square().mean() / (2 * factor**2)).backward()
        noise.step()
    assert not noise.estimate().unlike


@pytest.mark.slow
@pytest.mark.parametrize("power", [1, 5])
@pytest.mark.parametrize("width", [1, 3, 64])
def test_not_one_false_alarm_in_twenty_thousand_steps(width, power):
    """Looked at after every step of 100 histories; differences may have no variance to speak of."""
    generator = torch.Generator().manual_seed(width)
    for _ in range(100):
        cosines = torch.zeros(2, max(width, 3), dtype=torch.float64)
        draws = torch.randn(200, width, generator=generator, dtype=torch.float64)
        for difference in draws**power:
            note_cosine(cosines, 0, difference)
            assert not parts_differ(cosines)
