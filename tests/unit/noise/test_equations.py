"""Every estimator against the definitions and against known truth.

Synthetic gradients: per-sample gradient ~ N(G, Σ) with |G|² = 1, so that the true noise scale is
tr(Σ) and every expectation is known exactly.
"""

import pytest
import torch

from steadygrad.noise.equations import (
    from_halves,
    from_nested,
    from_part_sums,
)
from tests.reference import noise_scale as reference

DIM = 64
PARTS = 8


def from_parts(sq_norms, sq_mean, counts, weights=None):
    """The sums of the two equations, from every part's squared norm."""
    n = counts.to(sq_norms)
    w = n if weights is None else weights
    w = w / w.sum()
    return from_part_sums((w * sq_norms).sum(-1), sq_mean, (w / n).sum(), (w * w / n).sum())


def truth(noise_scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """A true gradient with norm 1, and unequal standard deviations with tr(Σ) = noise_scale."""
    generator = torch.Generator().manual_seed(0)
    g = torch.randn(DIM, generator=generator, dtype=torch.float64)
    variance = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)
    return g / g.norm(), (variance * (noise_scale / variance.sum())).sqrt()


def draw_means(count, ns, noise_scale, generator):
    """Mean gradients of parts with ``ns`` samples, shape (count, m, d)."""
    g, sigma = truth(noise_scale)
    z = torch.randn(count, len(ns), DIM, generator=generator)
    return g + sigma * z.double() / torch.tensor(ns, dtype=torch.float64).sqrt().view(-1, 1)


@pytest.mark.parametrize("counts", [[4, 4, 4], [1, 2, 5, 9], [1] * 6], ids=str)
@pytest.mark.parametrize("weighting", ["samples", "mean of means", "odd"])
def test_parts_agree_with_the_definition(counts, weighting):
    torch.manual_seed(0)
    gradients = torch.randn(sum(counts), 5, dtype=torch.float64) + 1
    weights = {
        "samples": [float(n) for n in counts],
        "mean of means": [1.0] * len(counts),
        "odd": [1.0 + i for i in range(len(counts))],
    }[weighting]
    means = reference.part_means(gradients, counts)
    w = torch.tensor(weights, dtype=torch.float64)
    mean = (w / w.sum()) @ means
    got = from_parts(means.square().sum(-1), mean.dot(mean), torch.tensor(counts), w)
    # 1e-12: the same float64 algebra in another order.
    assert torch.stack(got).tolist() == pytest.approx(
        reference.signal_and_noise(gradients, counts, weights), rel=1e-12
    )


def test_special_cases_are_one_formula():
    torch.manual_seed(1)
    g = torch.randn(2, 7, dtype=torch.float64)
    for n_1, n_2 in [(3, 3), (2, 5)]:
        halves = from_halves(g[0].dot(g[1]), (g[0] - g[1]).square().sum(), n_1=n_1, n_2=n_2)
        mean = (n_1 * g[0] + n_2 * g[1]) / (n_1 + n_2)
        parts = from_parts(g.square().sum(-1), mean.dot(mean), torch.tensor([n_1, n_2]))
        torch.testing.assert_close(halves[1], parts[1], rtol=1e-12, atol=0)
        if n_1 == n_2:
            torch.testing.assert_close(halves[0], parts[0], rtol=1e-12, atol=1e-14)


def test_noise_is_never_negative_and_zero_without_noise():
    same = torch.ones(4, 3, dtype=torch.float64)
    signal, noise = from_parts(
        same.square().sum(-1), same.mean(0).square().sum(), torch.tensor([1, 2, 3, 4])
    )
    assert noise.item() == pytest.approx(0, abs=1e-15)
    assert signal.item() == pytest.approx(3)


SCHEMES = {
    "equal": [8] * PARTS,
    "unequal": [2, 4, 6, 8, 8, 10, 12, 14],
    "ranks": [16] * 4,
    "halves": [32, 32],
    "odd halves": [31, 33],
    "examples": [1] * 16,
    "nested": None,
}


def batch_of(scheme):
    return sum(SCHEMES[scheme] or [64])


def measure(scheme, noise_scale, count, generator):
    counts = SCHEMES[scheme]
    if scheme == "nested":
        small, rest = draw_means(count, [8, 56], noise_scale, generator).unbind(1)
        big = (8 * small + 56 * rest) / 64
        return from_nested(small.square().sum(-1), big.square().sum(-1), b_small=8, b_big=64)
    g = draw_means(count, counts, noise_scale, generator)
    if "halves" in scheme:
        a, b = g.unbind(1)
        dot = (a * b).sum(-1)
        return from_halves(dot, (a - b).square().sum(-1), n_1=counts[0], n_2=counts[1])
    w = torch.tensor(counts, dtype=torch.float64)
    mean = ((w / w.sum()).view(-1, 1) * g).sum(1)
    return from_parts(g.square().sum(-1), mean.square().sum(-1), torch.tensor(counts))


def moments(scheme, ratio, total, seed=0, chunk=20_000):
    """Means and standard errors of signal and noise over ``total`` draws, relative to truth."""
    generator = torch.Generator().manual_seed(seed)
    noise_scale = ratio * batch_of(scheme)
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(total // chunk):
        got = torch.stack(measure(scheme, noise_scale, chunk, generator))
        got[1] /= noise_scale
        sums += torch.stack([got.sum(1), got.square().sum(1)])
    mean = sums[0] / total
    error = ((sums[1] / total - mean**2) / total).sqrt()
    return mean.tolist(), error.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("ratio", [0.5, 4])
def test_unbiased_against_known_truth(scheme, ratio):
    (signal, noise), (e_signal, e_noise) = moments(scheme, ratio, 60_000 if ratio < 1 else 200_000)
    assert max(e_signal, e_noise) < 0.0034  # so that 1 % stands at three standard errors
    assert signal == pytest.approx(1, abs=0.01)
    assert noise == pytest.approx(1, abs=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["equal", "unequal", "ranks", "examples"])
def test_unbiased_with_sixteen_times_more_noise_than_batch(scheme):
    (signal, noise), (e_signal, e_noise) = moments(scheme, 16, 1_200_000)
    assert max(e_signal, e_noise) < 0.0034
    assert signal == pytest.approx(1, abs=0.01)
    assert noise == pytest.approx(1, abs=0.01)


def test_one_part_alone_says_nothing_of_noise():
    got = from_parts(torch.ones(1), torch.ones(()), torch.ones(1))
    assert not any(torch.isfinite(x) for x in got)
