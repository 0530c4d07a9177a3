"""A small model, one training step around a `NoiseScale`, and gradients of single samples."""

import torch
from torch import nn

COUNTS = [2, 5, 3]

# The norms are taken in the gradients' own type, at least float32. In float64 they are exact to
# about 1e-12; what is left of 1e-9 is for the order of sums.
EXACT = 1e-9


def make(seed=0, dtype=torch.float64):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2))
    data = torch.randn(sum(COUNTS), 3), torch.randn(sum(COUNTS), 2)
    return model.to(dtype), *(x.to(dtype) for x in data)


def losses(model, x, y):
    return (model(x) - y).square().sum(-1)


def per_sample(model, x, y, wanted=None):
    """Every sample's gradient as a row."""
    rows = []
    for i in range(len(x)):
        chosen = [p for n, p in model.named_parameters() if wanted is None or wanted(n)]
        grads = torch.autograd.grad(losses(model, x[i : i + 1], y[i : i + 1]).sum(), chosen)
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows).detach()


def micro_weight(accumulation, n, counts):
    return {"mean": 1 / len(counts), "sum": 1.0, "samples": n / sum(counts)}[accumulation]


def measure(noise, model, x, y, counts=COUNTS, *, accumulation="mean", scale=1.0, weights=None):
    """One step's backward passes and its measurement; leaves the gradient in place."""
    model.zero_grad()
    for i, (a, b, n) in enumerate(zip(x.split(counts), y.split(counts), counts, strict=True)):
        weight = weights[i] if weights else micro_weight(accumulation, n, counts)
        loss = losses(model, a, b).mean() * weight * scale
        options = {"weight": weights[i]} if weights else {}
        with noise.microbatch(n, loss_scale=scale, **options):
            loss.backward()
    noise.step()


def last(noise):
    """The newest measurement: signal and noise of the whole."""
    got = noise.estimate()
    return [got.grad_sq_norm.item(), got.noise_trace.item()]


def synthetic(noise_scale, dim=64, seed=0):
    """A model whose per-sample gradient is N(G, Σ) with |G| = 1 and tr(Σ) = noise_scale."""
    generator = torch.Generator().manual_seed(seed)
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
