"""`SplitBatchNoiseScale`: what the golden files do not reach, and the original's defects."""

import copy

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import SplitBatchNoiseScale
from tests.reference import noise_scale as reference


def gradients(n, dim=6, noise_scale=4.0, seed=0):
    """Per-sample gradients as data: the loss x·w has the gradient x."""
    generator = torch.Generator().manual_seed(seed)
    g = torch.ones(dim, dtype=torch.float64) / dim**0.5
    z = torch.randn(n, dim, generator=generator, dtype=torch.float64)
    return g + z * (noise_scale / dim) ** 0.5


def weights(dim=6, dtype=torch.float64):
    return torch.zeros(dim, dtype=dtype, requires_grad=True)


def split_of(n, small, seed):
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    return order[small:], order[:small]


@pytest.mark.parametrize("n", [10, 11], ids=["even", "odd"])
def test_one_batch_is_the_definition(n):
    x, w = gradients(n), weights()
    estimator = SplitBatchNoiseScale(generator=torch.Generator().manual_seed(5))
    got = estimator(x @ w, w)
    big, small = split_of(n, n // 2, 5)
    rows = torch.cat([x[big], x[small]])
    a, b = x[big].mean(0), x[small].mean(0)
    noise = reference.signal_and_noise(rows, [len(big), len(small)], [len(big), len(small)])[1]
    assert got.item() == pytest.approx(noise / a.dot(b).item(), rel=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize("mode", ["alternative", "paper"])
def test_finds_a_known_noise_scale_with_odd_batches(mode):
    estimator = SplitBatchNoiseScale(mode=mode, update_rate=0.002)
    w = weights(32)
    torch.manual_seed(0)
    for seed in range(1500):
        got = estimator(gradients(33, 32, seed=seed) @ w, w)
    # 15 %: an average over about a thousand batches of 33 samples.
    assert got.item() == pytest.approx(4.0, rel=0.15)


@pytest.mark.parametrize("mode", ["alternative", "paper"])
@pytest.mark.parametrize("n", [10, 11])
def test_fill_grad_is_the_training_gradient(mode, n):
    model = nn.Sequential(nn.Linear(6, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    x = gradients(n)
    expected = torch.autograd.grad(model(x).squeeze(-1).mean() * 8.0, list(model.parameters()))
    for repeat in (1, 2):  # a second call adds, as backward does
        loss = model(x).squeeze(-1)
        estimator = SplitBatchNoiseScale(mode)
        estimator(loss, list(model.parameters()), fill_grad=True, loss_scale=8.0)
        for p, e in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(p.grad, repeat * e, rtol=1e-12, atol=1e-14)
    with pytest.raises(RuntimeError, match="second time"):
        loss.sum().backward()  # the graph is freed: no third pass is needed


def test_without_fill_grad_the_graph_and_the_gradients_stay():
    w = weights()
    loss = (gradients(8) @ w) ** 2
    SplitBatchNoiseScale()(loss, w)
    assert w.grad is None
    loss.mean().backward()
    assert w.grad is not None


def test_unused_parameters_and_any_nest():
    x, w, unused = gradients(8), weights(), weights(3)
    options = {"generator": torch.Generator().manual_seed(1)}
    alone = SplitBatchNoiseScale(**options)(x @ w, w)
    options = {"generator": torch.Generator().manual_seed(1)}
    nest = {"a": [w, (unused,)], "b": torch.zeros(2), "c": "no tensor"}
    assert SplitBatchNoiseScale(**options)(x @ w, nest).item() == alone.item()


def test_a_tied_parameter_counts_once():
    x, w, tied = gradients(8), weights(), weights()
    values = []
    for leaf, nest in [(w, w), (tied, {"embedding": tied, "head": tied})]:
        estimator = SplitBatchNoiseScale(generator=torch.Generator().manual_seed(1))
        values.append(estimator(x @ leaf, nest, fill_grad=True).item())
    assert values[0] == values[1]
    assert torch.equal(tied.grad, w.grad)


def test_a_module_and_a_generator_stand_for_the_parameters():
    model, x = nn.Linear(6, 1).double(), gradients(8)
    values = []
    for handed in (list(model.parameters()), model.parameters(), model):
        estimator = SplitBatchNoiseScale(generator=torch.Generator().manual_seed(1))
        values.append(estimator(model(x).squeeze(-1) ** 2, handed).item())
    assert values[0] == values[1] == values[2]


def test_tiny_gradients_keep_their_ratio():
    x, w = gradients(16), weights()
    torch.manual_seed(0)
    plain = SplitBatchNoiseScale()(x @ w, w)
    torch.manual_seed(0)
    # The original adds 1e-8 to the denominator and reports 0 here.
    assert SplitBatchNoiseScale()(x @ w * 1e-9, w).item() == pytest.approx(plain.item(), rel=1e-9)


def test_loss_scale_saves_a_float16_model():
    x = gradients(16).half()
    torch.manual_seed(0)
    exact = SplitBatchNoiseScale()(x.double() @ (w := weights()), w)
    w = weights(dtype=torch.float16)
    torch.manual_seed(0)
    got = SplitBatchNoiseScale()((x * w).sum(-1) * 2.0**-22, w, loss_scale=2.0**14)
    # 1 %: sums of float16 values.
    assert got.item() == pytest.approx(exact.item(), rel=0.01)


def test_paper_mode_with_clipping_is_not_zero():
    torch.manual_seed(0)
    w, x = weights(64), gradients(40, 64, noise_scale=20.0)
    plain = SplitBatchNoiseScale("paper", 0.25)(x @ w, w)
    torch.manual_seed(0)
    clipped = SplitBatchNoiseScale("paper", 0.25, gradient_norm_clip=1e-3)(x @ w, w)
    assert clipped.item() == pytest.approx(plain.item(), rel=1e-9)


def test_non_finite_batches_are_left_out():
    w = weights()
    estimator = SplitBatchNoiseScale()
    estimator(gradients(8, noise_scale=0.5) @ w, w)
    before = copy.deepcopy(estimator.state_dict())
    bad = gradients(8)
    bad[0, 0] = torch.nan
    estimator(bad @ w, w)
    after = estimator.state_dict()
    assert estimator.skipped.item() == 1
    for name in ("signal.total", "noise.total", "signal.mass"):
        assert torch.equal(before[name], after[name])


def test_unresolved_says_so():
    w = weights(2)
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.1]], dtype=torch.float64)  # opposite gradients
    estimator = SplitBatchNoiseScale()
    assert torch.isnan(estimator(x @ w, w))
    assert not estimator.resolved
    held = SplitBatchNoiseScale(negative="last_valid")
    assert held(x @ w, w).item() == 0.0


@pytest.mark.parametrize("negative", ["unresolved", "last_valid"])
def test_state_dict_goes_on_to_the_bit(negative):
    w, generator = weights(), torch.Generator().manual_seed(0)
    straight = SplitBatchNoiseScale(update_rate=0.1, negative=negative, generator=generator)
    for i in range(4):
        straight(gradients(9, seed=i) @ w, w)
    straight(gradients(9) @ w * torch.nan, w)  # left out
    # Opposite gradients: the averages turn negative, and the last valid value is asked for.
    opposite = torch.tensor([[30.0] * 6, [-30.0] * 6], dtype=torch.float64)
    loaded = SplitBatchNoiseScale(
        update_rate=0.1, negative=negative, generator=generator.clone_state()
    )
    loaded.load_state_dict(straight.state_dict())
    assert (loaded.resolved.item(), loaded.skipped.item()) == (True, 1)
    for data in [opposite, *(gradients(9, seed=i) for i in range(4, 8))]:
        a, b = straight(data @ w, w), loaded(data @ w, w)
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert straight.state_dict().keys() == loaded.state_dict().keys()
    for name, value in straight.state_dict().items():
        assert torch.equal(value, loaded.state_dict()[name])


def test_the_averages_follow_the_module():
    estimator = SplitBatchNoiseScale(update_rate=0.5).to("meta")
    buffers = dict(estimator.named_buffers())
    assert {b.device.type for b in buffers.values()} == {"meta"}
    # The original's averager keeps a second reference, which stays behind.
    assert estimator.signal.total is buffers["signal.total"]


def test_a_half_precision_model_keeps_what_was_measured():
    w, estimator = weights(), SplitBatchNoiseScale(update_rate=0.05, negative="last_valid")
    for i in range(5):
        # Squares of these gradients overflow float16.
        estimator(gradients(9, seed=i) @ w * 1e4, w)
    before, known = copy.deepcopy(estimator.state_dict()), str(estimator.estimate().as_dict())
    nn.ModuleList([estimator]).half()
    for name, value in estimator.state_dict().items():
        assert value.dtype == before[name].dtype, name
        assert torch.equal(value, before[name]), name
    assert str(estimator.estimate().as_dict()) == known


@pytest.mark.parametrize(
    "loss",
    [
        lambda w: (w * 1.0).sum(),
        lambda w: w.view(1, 6, 1)[:, :, 0][:, :1],
        lambda w: [w.sum()],
    ],
)
def test_bad_losses(loss):
    w = weights()
    with pytest.raises(InputError, match="`per_sample_loss`"):
        SplitBatchNoiseScale()(loss(w), w)


def test_bad_arguments():
    w = weights()
    for name, value in [("mode", "papper"), ("negative", "x"), ("batch_size_ratio", 0.5),
                        ("gradient_norm_clip", 0.0)]:  # fmt: skip
        with pytest.raises(InputError, match=f"`{name}`"):
            SplitBatchNoiseScale(**{name: value})
    for nest in (w.detach(), []):
        with pytest.raises(InputError, match="`tensors`"):
            SplitBatchNoiseScale()(gradients(8) @ w, nest)
    with pytest.raises(InputError, match=r"`tensors`.*leaves"):
        SplitBatchNoiseScale()(gradients(8) @ (v := w * 2), v, fill_grad=True)


def test_sparse_gradients_are_measured_like_dense_ones():
    values = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = torch.nn.Embedding(9, 4, sparse=sparse).double()
        estimator = SplitBatchNoiseScale(generator=torch.Generator().manual_seed(0))
        for x in torch.randint(9, (3, 6, 5)):
            estimator(table(x).square().mean((1, 2)), table)
        values.append(estimator.estimate().noise_trace.item())
    # 1e-12: rows are added up in another order.
    assert values[1] == pytest.approx(values[0], rel=1e-12)
