"""Backward passes that are no micro-batches of one loss, and steps that are thrown away."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from steadygrad.noise.witness import note_cosine, parts_differ
from tests.unit.noise.training_loop import accumulate, found, left_out, losses, make


def squared(output, y):
    return (output - y).square().mean()


def run(loop, steps=60):
    """The estimate of a loop over steps of four micro-batches with six samples each."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    noise = NoiseScale(model, samples=6, decay=1.0, drift=False)
    truth = torch.randn(5, 2)
    for step in range(steps):
        model.zero_grad()
        batches = [torch.randn(6, 5) for _ in range(4)]
        loop(model, noise, [(x, x @ truth + torch.randn(6, 2)) for x in batches], step)
    return noise.estimate()


def plain(model, noise, batches, step):
    for x, y in batches:
        squared(model(x), y).div(4).backward()
    noise.step()


def diagnoses(model, noise, batches, step):
    """A pass of its own, whose gradients are thrown away."""
    model(batches[0][0]).sum().backward()
    noise.drop_step()
    model.zero_grad()
    plain(model, noise, batches, step)


def fills(model, noise, batches, step, given=torch.empty(6, 5)):  # noqa: B008
    """One buffer for all samples, which is filled anew."""
    for x, y in batches:
        squared(model(given.copy_(x)), y).div(4).backward()
    noise.step()


@pytest.mark.parametrize("loop", [plain, diagnoses, fills])
def test_ordinary_steps_are_all_measured(loop):
    got = run(loop)
    assert got.skipped == 0
    assert got.resolved


def test_a_dropped_step_leaves_nothing_behind():
    """A loop that throws gradients away, and goes on with the next batch."""
    model, x, y = make()
    results = []
    for dropped in (False, True):
        noise = NoiseScale(model, samples=5)
        for number in range(3):
            model.zero_grad()
            if dropped and number == 1:
                losses(model, x, y).sum().backward()
                model.zero_grad()
                noise.drop_step()
            accumulate(model, x, y)
            noise.step()
        assert left_out(noise) == (0, 0)
        results.append(found(noise))
        noise.remove()
    assert torch.equal(*results)


def two_losses(model, noise, batches, step):
    """Each with a forward pass of its own over the same tensors."""
    for x, y in batches:
        squared(model(x), y).div(4).backward()
        (model(x) - y).abs().mean().div(4).backward()
    noise.step()


def penalises(model, noise, batches, step):
    """With a penalty on the weights, which no forward pass of the model has."""
    for x, y in batches:
        squared(model(x), y).div(4).backward()
    sum(p.square().sum() for p in model.parameters()).backward()
    noise.step()


@pytest.mark.parametrize(("loop", "what"), [(two_losses, "same samples"), (penalises, "penalty")])
def test_passes_that_are_no_micro_batches_are_refused(loop, what):
    with pytest.raises(InputError, match=what):
        run(loop, steps=1)


class Heads(nn.Module):
    """A body and two heads, of the same samples."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        h = self.body(x)
        return [head(h) for head in self.heads]


def apart(noise, a, b):
    a.backward(retain_graph=True)
    b.backward()


def kept_apart(noise, a, b):
    for loss in (a, b):
        loss.backward(retain_graph=True)


def apart_in_contexts(noise, a, b):
    for loss in (a, b):
        with noise.microbatch(4):
            loss.backward(retain_graph=True)


def apart_in_one(noise, a, b):
    with noise.microbatch(4):
        apart(noise, a, b)


def summed(noise, a, b):
    (a + b).backward()


def repeated(backward, **options):
    """Three steps of two micro-batches, each with two losses of one forward pass."""
    torch.manual_seed(0)
    model = Heads().double()
    noise = NoiseScale(model, **options)
    for x in torch.randn(3, 2, 4, 3, dtype=torch.float64):
        model.zero_grad()
        for half in x:
            backward(noise, *(out.square().mean() / 2 for out in model(half)))
        noise.step()
    return found(noise)


@pytest.mark.parametrize(
    ("backward", "options"),
    [
        (apart, {"samples": 4}),
        (kept_apart, {"samples": 4}),
        (apart_in_contexts, {}),
        (apart_in_contexts, {"source": "accumulated"}),
    ],
)
def test_two_backward_passes_over_one_forward_pass_are_refused(backward, options):
    with pytest.raises(InputError, match="same samples"):
        repeated(backward, **options)


def test_or_added_up_in_one_context():
    """By the difference that both make to `.grad`; 1e-12: it is a difference."""
    together, added = repeated(summed, samples=4), repeated(apart_in_one, source="accumulated")
    assert torch.allclose(added, together, rtol=1e-12)


def test_a_graph_that_is_kept_for_nothing_changes_nothing():
    """Nor one that is asked for gradients, nor one whose beginning all micro-batches share."""
    torch.manual_seed(0)
    shared, body = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
    model, x = nn.ModuleList([shared, body]), torch.randn(3, 4, 3, dtype=torch.float64)
    results = []
    for way in ("plain", "kept", "asked for some", "asked for all"):
        noise = NoiseScale(model, samples=4)
        for _ in range(2):
            model.zero_grad()
            weight = shared(torch.eye(3, dtype=torch.float64))
            parts = [body(part @ weight).square().mean() / 3 for part in x]
            for loss in parts if "asked" in way else []:
                of = body if way == "asked for some" else model
                torch.autograd.grad(loss, [*of.parameters()], retain_graph=True)
            for number, loss in enumerate(parts):
                loss.backward(retain_graph=way == "kept" or number < 2)
            noise.step()
        assert noise.skipped.item() == 0
        results.append(found(noise))
        noise.remove()
    assert all(torch.equal(result, results[0]) for result in results)


# Parts that are told by what first and last ones of a step differ in.

bce = nn.functional.binary_cross_entropy_with_logits


def discriminator(model, noise):
    """The original loop: a sample is a pair, and each of its halves has a pass of its own."""
    for shift in (0.5, -0.5):
        x = torch.randn(8, 3) + shift
        yield bce(model(x)[:, :1], torch.full((8, 1), float(shift > 0)))


def forward_passes_of_the_same_samples(model, noise):
    for _ in range(2):
        x = torch.randn(8, 3)
        yield (model(x)[:, 0] - x[:, 0]).square().mean() / 2
        # Read anew: the same tensor would be known.
        yield 0.3 * (model(x.clone())[:, 0] - x[:, 0]).abs().mean() / 2


def micro_batches(model, noise, sizes=(8, 8, 8)):
    """Ordinary ones; what is drawn is far from normal, and one of a hundred samples is huge."""
    for n in sizes:
        noise.samples(n)
        x = torch.randn(n, 3).exp() * (1 + 30 * (torch.rand(n, 1) < 0.01))
        yield (model(x)[:, 0] - x[:, 0]).square().mean() / len(sizes)


def ragged(model, noise):
    yield from micro_batches(model, noise, (8, 5, 1))


def trained(parts, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    noise = NoiseScale(model, decay=1.0, samples=8, drift=False)
    for _ in range(steps):
        optimizer.zero_grad()
        for loss in parts(model, noise):
            loss.backward()
        noise.step()
        optimizer.step()
    return noise


@pytest.mark.parametrize("parts", [discriminator, forward_passes_of_the_same_samples])
def test_parts_of_one_loss_are_not_taken_for_micro_batches(parts):
    noise = trained(parts, steps=120)
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
    got = trained(parts, steps=200).estimate()
    assert (got.unlike.item(), got.reason) == (False, None)


def test_samples_that_come_in_a_fixed_order_are_noticed():
    """Each step's first micro-batch is the same: the spread of parts is that of two samples."""
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    for _ in range(30):
        model.zero_grad()
        accumulate(model, x, y)
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
