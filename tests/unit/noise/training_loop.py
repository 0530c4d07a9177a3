"""A small model, training steps around a `NoiseScale`, gradients of one sample, and histories."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.reference import noise_scale as reference

COUNTS = [2, 5, 3]

# The norms are taken in the gradients' own type, at least float32. In float64 they are exact to
# about 1e-12; what is left of 1e-9 is for the order of sums.
EXACT = 1e-9


class Shared(nn.Module):
    """A layer that is used twice and shares its weight, without a checkpoint or each in its own."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.twice, self.tied, self.head = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.tied.weight = self.twice.weight
        self.reentrant = reentrant

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in (self.twice, self.twice, self.tied):
            if self.reentrant is None:
                x = layer(x).tanh()
            else:
                x = checkpoint(layer, x, use_reentrant=self.reentrant).tanh()
        return self.head(x)


def make(dtype=torch.float64, model=None):
    torch.manual_seed(0)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)]
    model = nn.Sequential(*layers) if model is None else model()
    data = torch.randn(sum(COUNTS), 3), torch.randn(sum(COUNTS), 2)
    return model.to(dtype), *(x.to(dtype) for x in data)


def losses(model, x, y):
    return (model(x) - y).square().sum(-1)


def per_sample(model, x, y, wanted=lambda name: True):
    """Every sample's gradient as a row."""
    chosen = [p for name, p in model.named_parameters() if wanted(name)]
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(losses(model, x[i : i + 1], y[i : i + 1]).sum(), chosen)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).detach()


def accumulate(model, x, y, noise=None, *, counts=(5, 5), weights=None, scale=1.0, **told):
    """A step's backward passes, each in a context of `noise`, told so, if that is given."""
    weights = weights or [1 / len(counts)] * len(counts)
    for a, b, weight in zip(x.split([*counts]), y.split([*counts]), weights, strict=True):
        loss = losses(model, a, b).mean() * weight * scale
        with noise.microbatch(len(a), **told) if noise else nullcontext():
            loss.backward()


def measure(noise, model, x, y, counts=COUNTS, **options):
    """One step's backward passes and its measurement; leaves the gradient in place."""
    model.zero_grad()
    accumulate(model, x, y, noise, counts=counts, **options)
    noise.step()


def last(noise):
    """The newest measurement: signal and noise of the whole."""
    got = noise.estimate()
    return [got.grad_sq_norm.item(), got.noise_trace.item()]


def assert_defined(estimate, rows, counts, weights=None, rel=EXACT):
    """Signal and noise are those of the definition, from single samples' gradients."""
    expected = reference.signal_and_noise(rows, counts, weights or [1.0] * len(counts))
    got = [estimate.grad_sq_norm.item(), estimate.noise_trace.item()]
    assert got == pytest.approx(expected, rel=rel)


def found(noise):
    """Every kept measurement, to the bit."""
    return noise.state_dict()["ring"]


def left_out(noise):
    """Numbers of steps left out, and of altered ones among them."""
    return noise.skipped.item(), noise.altered.item()


class Preconditioned(torch.optim.SGD):
    """An optimizer whose second moments are there from the beginning."""

    def __init__(self, model, *, betas=None, **state):
        super().__init__(model.parameters(), lr=0.0)
        self.param_groups[0]["betas"] = betas
        for p in model.parameters():
            self.state[p] = {"exp_avg_sq": torch.ones_like(p), **state}


def synthetic(noise_scale):
    """A model whose per-sample gradient is N(G, Σ) with |G| = 1 and tr(Σ) = noise_scale."""
    dim, generator = 64, torch.Generator().manual_seed(0)
    g = torch.randn(dim, generator=generator, dtype=torch.float64)
    g /= g.norm()
    model = nn.Linear(dim, 1, bias=False).double()

    def sample(n):
        z = torch.randn(n, dim, generator=generator, dtype=torch.float64)
        return g + z * (noise_scale / dim) ** 0.5

    return model, sample


def run(noise, model, sample, steps, counts):
    for _ in range(steps):
        model.zero_grad()
        for n in counts:
            with noise.microbatch(n):
                (model(sample(n)).mean() / len(counts)).backward()
        noise.step()


def histories(course, strength, replicates=500, seed=0, rho=0.0):
    """Noise and signal, newest first, of 8 parts of 8 samples in 64 dimensions.

    The true signal is 1 over `course`, so that the ratio is `64 * strength * course`.
    """
    generator = torch.Generator().manual_seed(seed)
    shape = (replicates, len(course))

    def chi_square(degrees):
        half = torch.full(shape, degrees / 2, dtype=torch.float64)
        return 2 * torch._standard_gamma(half, generator=generator)

    axis = strength / 64
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    noise = 64 * strength * chi_square(448) / 448
    signal = (course**-0.5 + axis**0.5 * normal).square() + axis * chi_square(63) - noise / 64
    return correlated(noise, rho), correlated(signal, rho)


def correlated(x, rho):
    z = x - x.mean()
    for t in range(1, x.shape[-1]) if rho else ():
        z[:, t] = rho * z[:, t - 1] + (1 - rho**2) ** 0.5 * z[:, t]
    return z + x.mean()


def course_of(growth, n, span):
    age = torch.arange(n, dtype=torch.float64)
    courses = {"none": torch.ones_like(age), "exponential": 4 ** (-age / span)}
    return courses.get(growth, 1 - 0.75 * age / n)
