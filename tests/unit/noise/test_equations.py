"""Every estimator against the definitions and against known truth.

Synthetic gradients: per-sample gradient ~ N(G, Σ) with |G|² = 1, so that the true noise scale is
tr(Σ) and every expectation is known exactly.
"""

import pytest
import torch

from steadygrad.noise.equations import from_halves, from_nested, from_part_sums, is_altered
from tests.reference import noise_scale as reference
from tests.reference import summed_parts

DIM = 64


def from_parts(sq_norms, sq_mean, counts, weights=None):
    """The sums of the two equations, from every part's squared norm."""
    n = torch.tensor(counts).to(sq_norms)
    w = n if weights is None else torch.tensor(weights).to(sq_norms)
    w = w / w.sum()
    return from_part_sums((w * sq_norms).sum(-1), sq_mean, (w / n).sum(), (w * w / n).sum())


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
    got = from_parts(means.square().sum(-1), mean.dot(mean), counts, weights)
    # 1e-12: the same float64 algebra in another order.
    assert torch.stack(got).tolist() == pytest.approx(
        reference.signal_and_noise(gradients, counts, weights), rel=1e-12
    )


def test_equal_parts_have_no_noise_and_one_part_says_nothing_of_it():
    same = torch.ones(4, 3, dtype=torch.float64)
    signal, noise = from_parts(same.square().sum(-1), same.mean(0).square().sum(), [1, 2, 3, 4])
    assert noise.item() == pytest.approx(0, abs=1e-15)
    assert signal.item() == pytest.approx(3)
    assert not any(map(torch.isfinite, from_parts(torch.ones(1), torch.ones(()), [1])))


SCHEMES = {
    "equal": [8] * 8,
    "unequal": [2, 4, 6, 8, 8, 10, 12, 14],
    "ranks": [16] * 4,
    "halves": [32, 32],
    "odd halves": [31, 33],
    "examples": [1] * 16,
    "nested": [8, 56],
}


def measure(scheme, noise_scale, draws, generator):
    """Signal and noise of many batches; unequal standard deviations with tr(Σ) = noise_scale."""
    counts = torch.tensor(SCHEMES[scheme]).double()
    variance = torch.linspace(0.5, 1.5, DIM, dtype=torch.float64)
    sigma = (variance * (noise_scale / variance.sum())).sqrt()
    z = torch.randn(draws, len(counts), DIM, generator=generator)
    # The true gradient's direction does not matter.
    g = DIM**-0.5 + sigma * z.double() / counts.sqrt().view(-1, 1)
    mean = ((counts / counts.sum()).view(-1, 1) * g).sum(1)
    if scheme == "nested":
        return from_nested(g[:, 0].square().sum(-1), mean.square().sum(-1), b_small=8, b_big=64)
    if "halves" in scheme:
        a, b = g.unbind(1)
        n_1, n_2 = SCHEMES[scheme]
        return from_halves((a * b).sum(-1), (a - b).square().sum(-1), n_1=n_1, n_2=n_2)
    return from_parts(g.square().sum(-1), mean.square().sum(-1), SCHEMES[scheme])


NOISY = ["equal", "unequal", "ranks", "examples"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "ratio", "total"),
    [
        *((scheme, 0.5, 60_000) for scheme in SCHEMES),
        *((scheme, 4, 200_000) for scheme in SCHEMES),
        *((scheme, 16, 1_200_000) for scheme in NOISY),
    ],
)
def test_unbiased_against_known_truth(scheme, ratio, total):
    """Noise scales of half the batch to 16 of them."""
    generator, chunk = torch.Generator().manual_seed(0), 20_000
    noise_scale = ratio * sum(SCHEMES[scheme])
    sums = torch.zeros(2, 2, dtype=torch.float64)
    for _ in range(total // chunk):
        got = torch.stack(measure(scheme, noise_scale, chunk, generator))
        got[1] /= noise_scale
        sums += torch.stack([got.sum(1), got.square().sum(1)])
    mean = sums[0] / total
    error = ((sums[1] / total - mean**2) / total).sqrt()
    assert error.max() < 0.0034  # so that 1 % stands at three standard errors
    assert mean.tolist() == pytest.approx([1, 1], abs=0.01)


# Whether a gradient is the sum of its parts


TYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def drawn(seed, m, dtype, mean=0.0):
    generator = torch.Generator().manual_seed(seed)
    return list((torch.randn(m, 40, generator=generator, dtype=torch.float64) + mean).to(dtype))


def judged(parts, gradient):
    rows = torch.stack([part.double() for part in parts])
    unit = max(torch.finfo(gradient.dtype).eps / 2, 2**-48)
    squares = summed_parts.running_squares(rows)
    return bool(is_altered(rows.sum(0), gradient.double(), squares, unit))


@pytest.mark.few(9)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("mean", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("m", [2, 8, 64])
def test_a_sum_with_its_roundings_is_no_alteration(dtype, mean, m):
    for seed in range(200):
        parts = drawn(seed, m, dtype, mean)
        assert not judged(parts, summed_parts.accumulated(parts, dtype)), seed


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "change",
    [lambda g: g * 0.8, lambda g: g / 2, lambda g: g * 1024, lambda g: g + 0.5 * g.flip(0)],
    ids=["clipped", "divided", "scaled", "left over"],
)
def test_every_alteration_is_noticed(dtype, change):
    for seed in range(200):
        parts = drawn(seed, 4, dtype)
        gradient = change(summed_parts.accumulated(parts, dtype)).to(dtype)
        assert summed_parts.is_altered(parts, gradient)
        assert judged(parts, gradient), seed


def test_between_processes_any_order_of_additions_is_allowed():
    for seed in range(200):
        generator = torch.Generator().manual_seed(seed)
        own = [part.bfloat16() for part in drawn(seed, 8, torch.float64, mean=seed % 3)]
        order = torch.randperm(8, generator=generator).tolist()
        found = summed_parts.accumulated([own[i] for i in order], torch.bfloat16).double()
        squares = sum(summed_parts.running_squares(part.double()[None]) for part in own)
        seen = torch.stack(own).double().sum(0)
        assert not is_altered(seen, found, squares, 2**-8, processes=8)
        assert is_altered(seen, found / 2, squares, 2**-8, processes=8)


def test_parts_that_are_not_finite_are_no_alteration():
    parts = [torch.tensor([1.0, 1.0]), torch.tensor([torch.inf, 1.0])]
    assert not judged(parts, torch.tensor([2.0, 2.0]))
