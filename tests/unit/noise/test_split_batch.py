"""`SplitBatchNoiseScale`: what the golden files do not reach, and the original's defects."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import SplitBatchNoiseScale
from steadygrad.noise.intervals import ratio_of_averages


def drawn(seed, count=1, batch=8, dim=6, noise_scale=4.0):
    """Per-sample gradients from N(G, Σ) as data: the loss x·w has the gradient x."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(count, batch, dim, generator=generator, dtype=torch.float64)
    return dim**-0.5 + z * (noise_scale / dim) ** 0.5


def weights(dim=6, dtype=torch.float64):
    return torch.zeros(dim, dtype=dtype, requires_grad=True)


def make(*args, seed=0, **options):
    return SplitBatchNoiseScale(*args, generator=torch.Generator().manual_seed(seed), **options)


def fed(estimator, data, w=None):
    w = weights(data.shape[-1]) if w is None else w
    for x in data:
        estimator(x @ w, w)
    return estimator


@pytest.mark.parametrize("batch", [16, 17], ids=["even", "odd"])
def test_value_and_interval_are_those_of_the_batches_own_estimates(batch):
    """Straight from the two equations of each batch, with the weights of the averages."""
    estimator, w = make(update_rate=0.1, level=0.8), weights()
    signal, noise, last = [], [], None
    n_small = batch // 2
    n_big = batch - n_small
    for x in drawn(1, count=30, batch=batch):
        order = torch.randperm(batch, generator=estimator.generator.clone_state())
        a, b = (x[part].mean(0) for part in (order[n_small:], order[:n_small]))
        signal.append(a.dot(b))
        noise.append((a - b).square().sum() * n_small * n_big / batch)
        last = estimator(x @ w, w)
    age = torch.arange(29, -1, -1, dtype=torch.float64)
    expected = ratio_of_averages(torch.stack(noise), torch.stack(signal), 0.9**age, level=0.8)
    got = estimator.estimate()
    # 1e-10: the same float64 sums, with the weights in another order.
    for name in ("value", "low", "high", "effective"):
        number = getattr(expected, name).item()
        assert getattr(got, name).item() == pytest.approx(number, rel=1e-10)
    assert got.value.item() == pytest.approx(last.item(), rel=1e-10)
    assert got.measurements.item() == 30


@pytest.mark.parametrize("mode", ["alternative", "paper"])
@pytest.mark.parametrize("n", [10, 11])
def test_fill_grad_is_the_training_gradient(mode, n):
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = drawn(0, batch=n)[0]
    expected = torch.autograd.grad(model(x).squeeze(-1).mean() * 8.0, list(model.parameters()))
    for repeat in (1, 2):  # a second call adds, as backward does
        loss = model(x).squeeze(-1)
        make(mode)(loss, list(model.parameters()))  # without it graph and gradients stay
        make(mode)(loss, list(model.parameters()), fill_grad=True, loss_scale=8.0)
        for p, e in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, repeat * e, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        loss.sum().backward()  # the graph is freed: no third pass is needed


def value_of(x, *args, **options):
    w = weights(x.shape[-1])
    return make(*args, **options)(x @ w, w).item()


def test_what_the_original_takes_for_zero():
    """It adds 1e-8 to the denominator, and clips both parts to one norm."""
    x = drawn(0, batch=16)[0]
    assert value_of(x * 1e-9) == pytest.approx(value_of(x), rel=1e-9)
    x = drawn(0, batch=40, dim=64, noise_scale=20.0)[0]
    clipped = value_of(x, "paper", 0.25, gradient_norm_clip=1e-3)
    assert clipped == pytest.approx(value_of(x, "paper", 0.25), rel=1e-9)


def test_loss_scale_saves_a_float16_model():
    x, w = drawn(0, batch=16)[0].half(), weights(dtype=torch.float16)
    got = make()((x * w).sum(-1) * 2.0**-22, w, loss_scale=2.0**14)
    # 1 %: sums of float16 values.
    assert got.item() == pytest.approx(value_of(x.double()), rel=0.01)


@pytest.mark.parametrize("update_rate", [0.1, 0.7])
@pytest.mark.parametrize("negative", ["unresolved", "last_valid"])
def test_resumes_to_the_bit(negative, update_rate):
    """With a ring that goes round or does not; what is asked for while averages are negative."""
    w, straight = weights(), make(update_rate=update_rate, negative=negative)
    fed(straight, drawn(0, count=8, batch=9), w)
    fed(straight, drawn(0, batch=9) * torch.nan, w)  # left out
    loaded = make(update_rate=update_rate, negative=negative)
    loaded.generator = straight.generator.clone_state()
    loaded.load_state_dict(copy.deepcopy(straight.state_dict()))
    assert (loaded.resolved.item(), loaded.skipped.item()) == (True, 1)
    opposite = torch.tensor([[30.0] * 6, [-30.0] * 6], dtype=torch.float64)
    for data in [opposite, *drawn(1, count=4, batch=9)]:
        a, b = straight(data @ w, w), loaded(data @ w, w)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    for name, value in straight.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])
    assert str(straight.estimate().as_dict()) == str(loaded.estimate().as_dict())
    assert straight.estimate().measurements.item() == min(len(straight.ring), 13)


def test_nothing_waits_for_the_device():
    """On a device without memory any read of a value raises. The averages move along."""
    estimator = make(update_rate=0.5).to("meta")
    # The original's averager keeps a second reference, which stays behind.
    assert estimator.signal.total is dict(estimator.named_buffers())["signal.total"]
    w = torch.zeros(6, device="meta", requires_grad=True)
    for fill_grad in (False, True):
        estimator(torch.zeros(8, 6, device="meta") @ w, w, fill_grad=fill_grad)
    numbers = vars(estimator.estimate()).items()
    read = {n for n, x in numbers if isinstance(x, torch.Tensor) and not x.is_meta}
    # A constant: it leaves out nothing for that.
    assert read == {"altered"}


@pytest.mark.parametrize(
    ("loss", "tensors", "name"),
    [
        (lambda w: w.sum(), lambda w: w, "per_sample_loss"),
        (lambda w: w.view(6, 1), lambda w: w, "per_sample_loss"),
        (lambda w: [w.sum()], lambda w: w, "per_sample_loss"),
        (lambda w: w, lambda w: w.detach(), "tensors"),
        (lambda w: w, lambda w: [], "tensors"),
        (lambda w: w, lambda w: w * 1, "tensors"),
    ],
)
def test_bad_batches(loss, tensors, name):
    w = weights()
    with pytest.raises(InputError, match=f"`{name}`"):
        make()(loss(w), tensors(w), fill_grad=True)
