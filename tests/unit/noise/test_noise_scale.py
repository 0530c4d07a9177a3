"""`NoiseScale` against the definitions, on gradients of single samples taken one by one."""

import copy
import math
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference

COUNTS = [2, 5, 3]


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


# 1e-6: the norms are taken in the gradients' own type but at least float32; float64 stays exact
# to about 1e-12, and a little is left for the sums' order.
EXACT = 1e-9


@pytest.mark.parametrize("accumulation", ["mean", "sum", "samples"])
@pytest.mark.parametrize("source", ["microbatch", "accumulated"])
def test_unequal_micro_batches(accumulation, source):
    model, x, y = make()
    noise = NoiseScale(model, source=source, accumulation=accumulation)
    measure(noise, model, x, y, accumulation=accumulation)
    weights = [micro_weight(accumulation, n, COUNTS) for n in COUNTS]
    expected = reference.signal_and_noise(per_sample(model, x, y), COUNTS, weights)
    scale = sum(weights) ** 2 if accumulation == "sum" else 1.0
    assert scale in (1.0, 9.0)
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_explicit_weights():
    model, x, y = make()
    weights = [0.2, 0.5, 0.3]
    noise = NoiseScale(model)
    measure(noise, model, x, y, weights=weights)
    expected = reference.signal_and_noise(per_sample(model, x, y), COUNTS, weights)
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_a_wrong_accumulation_leaves_the_ratio_right():
    model, x, y = make()
    right, wrong = NoiseScale(model), NoiseScale(model)
    for noise, factor in [(right, "mean"), (wrong, "sum")]:
        measure(noise, model, x, y, counts=[5, 5], accumulation=factor)
    assert wrong.estimate().value.item() == pytest.approx(right.estimate().value.item(), rel=1e-12)
    assert wrong.estimate().grad_sq_norm.item() == pytest.approx(4 * last(right)[0], rel=1e-12)


@pytest.mark.parametrize("counts", [[10], [5, 5], COUNTS], ids=str)
def test_single_examples_as_parts(counts):
    model, x, y = make()
    noise = NoiseScale(model, source="per_example", accumulation="samples")
    measure(noise, model, x, y, counts, accumulation="samples")
    expected = reference.signal_and_noise(per_sample(model, x, y), [1] * 10, [1.0] * 10)
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_single_examples_of_norm_layers_only():
    model, x, y = make()
    noise = NoiseScale(model, source="per_example", layers="norm")
    measure(noise, model, x, y, [5, 5])
    rows = per_sample(model, x, y, wanted=lambda n: n.startswith("2."))
    expected = reference.signal_and_noise(rows, [1] * 10, [1.0] * 10)
    assert last(noise) == pytest.approx(expected, rel=EXACT)
    assert list(noise.estimate().by_group) == ["2"]


def test_groups_add_up_and_each_is_right():
    model, x, y = make()
    noise = NoiseScale(model, groups=lambda name: name.split(".")[1])
    measure(noise, model, x, y)
    whole = noise.estimate()
    assert set(whole.by_group) == {"weight", "bias"}
    for name, group in whole.by_group.items():
        rows = per_sample(model, x, y, wanted=lambda n, name=name: n.endswith(name))
        expected = reference.signal_and_noise(rows, COUNTS, [1.0] * 3)
        got = [group.grad_sq_norm.item(), group.noise_trace.item()]
        assert got == pytest.approx(expected, rel=EXACT)
    parts = whole.by_group.values()
    assert sum(g.noise_trace.item() for g in parts) == pytest.approx(whole.noise_trace.item())


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
def test_loss_scale_changes_nothing(source):
    model, x, y = make()
    plain, scaled = NoiseScale(model, source=source), NoiseScale(model, source=source)
    measure(plain, model, x, y, [5, 5])
    measure(scaled, model, x, y, [5, 5], scale=2.0**16)
    # Powers of two scale exactly.
    assert last(scaled) == last(plain)


def test_gradients_unscaled_before_the_measurement():
    model, x, y = make()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    plain, scaled = NoiseScale(model), NoiseScale(model, scaler=scaler)
    measure(plain, model, x, y, [5, 5])
    model.zero_grad()
    for a, b in zip(x.split(5), y.split(5), strict=True):
        with scaled.microbatch(5):
            scaler.scale(losses(model, a, b).mean() / 2).backward()
    scaler.unscale_(optimizer)
    scaled.step(grad_scale=1.0)
    assert last(scaled) == pytest.approx(last(plain), rel=1e-12)


def test_an_overflowed_step_is_left_out_and_counted():
    model, x, y = make()
    noise = NoiseScale(model)
    measure(noise, model, x, y)
    before = noise.estimate().as_dict()
    bad = x.clone()
    bad[0, 0] = torch.inf
    measure(noise, model, bad, y)
    assert noise.estimate().as_dict() == before
    assert noise.skipped.item() == 1
    assert before["measurements"] == 1


def run_out_of_memory(noise, loss):
    with noise.microbatch(10):
        loss.backward()
        raise MemoryError


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
def test_a_failed_backward_spoils_only_its_step(source):
    model, x, y = make()
    noise = NoiseScale(model, source=source)
    measure(noise, model, x, y, [5, 5])
    before = last(noise)
    with pytest.raises(MemoryError):
        run_out_of_memory(noise, losses(model, x, y).mean())
    model.zero_grad()
    loss = losses(model, x, y).mean()
    with noise.microbatch(10):  # the usual second attempt after running out of memory
        loss.backward()
    noise.step()
    assert (last(noise), noise.skipped.item()) == (before, 1)
    measure(noise, model, x, y, [5, 5])
    assert last(noise) == pytest.approx(before)


def test_half_precision_gradients_are_measured_in_float32():
    model, x, y = make()
    half = copy.deepcopy(model).to(torch.float16)
    exact, rough = NoiseScale(model), NoiseScale(half)
    # Squares of these gradients overflow float16: their norms are far above 256.
    measure(exact, model, x * 1, y, [5, 5], scale=300.0)
    measure(rough, half, x.half(), y.half(), [5, 5], scale=300.0)
    # 2 %: float16 has 11 bits, and noise is a difference of squares.
    assert last(rough) == pytest.approx(last(exact), rel=0.02)


def test_clipping_after_the_measurement_changes_nothing():
    model, x, y = make()
    noise = NoiseScale(model)
    for _ in range(2):
        measure(noise, model, x, y)
        nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    rows = per_sample(model, x, y)
    assert last(noise) == pytest.approx(reference.signal_and_noise(rows, COUNTS, [1.0] * 3))


class Tied(nn.Module):
    """An embedding that is also the output layer, with a layer used twice."""

    def __init__(self, mode=None):
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.twice = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.mode = mode

    def forward(self, x):
        h = self.embed(x)
        for _ in range(2):
            if self.mode is None:
                h = torch.tanh(self.twice(h))
            else:
                h = checkpoint(lambda t: torch.tanh(self.twice(t)), h, use_reentrant=self.mode)
        return self.head(h)


def token_losses(model, x):
    out = model(x[:, :-1]).flatten(0, 1)
    loss = nn.functional.cross_entropy(out, x[:, 1:].flatten(), reduction="none")
    return loss.view(len(x), -1).mean(-1)


def tied_reference(model, x, parts, weights):
    rows = []
    for row in x:
        grads = torch.autograd.grad(token_losses(model, row[None]).sum(), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return reference.signal_and_noise(torch.stack(rows).detach(), parts, weights)


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
@pytest.mark.parametrize("mode", [None, False], ids=["plain", "checkpointed"])
def test_tied_weights_and_checkpointing(source, mode):
    torch.manual_seed(0)
    model, x = Tied(mode).double(), torch.randint(7, (6, 5))
    noise = NoiseScale(model, source=source)
    for micro in x.split(3):
        loss = token_losses(model, micro).mean() / 2
        with noise.microbatch(3):
            loss.backward()
    noise.step()
    parts = [1] * 6 if source == "per_example" else [3, 3]
    expected = tied_reference(model, x, parts, [1.0] * len(parts))
    assert last(noise) == pytest.approx(expected, rel=EXACT)


def test_reentrant_checkpoint_of_a_reused_layer_is_refused_by_name():
    torch.manual_seed(0)
    model, x = Tied(mode=True).double(), torch.randint(7, (6, 5))
    noise = NoiseScale(model)
    loss = token_losses(model, x).mean()
    with (
        pytest.raises(InputError, match=r"'twice.bias'.*source='accumulated'"),
        noise.microbatch(6),
    ):
        loss.backward()


def test_reentrant_checkpoint_with_the_accumulated_source():
    torch.manual_seed(0)
    model, x = Tied(mode=True).double(), torch.randint(7, (6, 5))
    noise = NoiseScale(model, source="accumulated")
    for micro in x.split(3):
        with noise.microbatch(3):
            (token_losses(model, micro).mean() / 2).backward()
    noise.step()
    model.mode = None  # autograd.grad cannot go through a reentrant checkpoint
    assert last(noise) == pytest.approx(tied_reference(model, x, [3, 3], [1.0, 1.0]), rel=EXACT)


def test_unused_and_frozen_parameters_count_as_nothing():
    model, x, y = make()
    model.unused = nn.Linear(9, 9).double()
    model[0].requires_grad_(False)
    model.forward = lambda t: model[3](model[2](model[1](model[0](t))))
    noise = NoiseScale(model)
    measure(noise, model, x, y)
    rows = per_sample(model, x, y, wanted=lambda n: n[0] in "23")
    assert last(noise) == pytest.approx(reference.signal_and_noise(rows, COUNTS, [1.0] * 3))
    assert set(noise.estimate().by_group) == {"2", "3", "unused"}


@pytest.mark.slow
def test_a_compiled_model():
    model, x, y = make()
    compiled = torch.compile(model)
    noise = NoiseScale(compiled)
    measure(noise, compiled, x, y, [5, 5])
    expected = reference.signal_and_noise(per_sample(model, x, y), [5, 5], [1.0, 1.0])
    assert last(noise) == pytest.approx(expected, rel=EXACT)
    assert set(noise.estimate().by_group) == {"0", "2", "3"}


def test_batch_norm_is_warned_of():
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    with pytest.warns(UserWarning, match=r"'1' \(BatchNorm1d\) normalises over the batch"):
        NoiseScale(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        NoiseScale(model.eval())


@pytest.mark.parametrize("every", [1, 2])
def test_resumes_to_the_bit(every):
    model, x, y = make()
    straight, first = NoiseScale(model, every=every), NoiseScale(model, every=every)
    for i in range(6):
        measure(straight, model, x * (1 + i), y)
    for i in range(3):
        measure(first, model, x * (1 + i), y)
    second = NoiseScale(model, every=every)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for i in range(3, 6):
        measure(second, model, x * (1 + i), y)
    assert str(second.estimate().as_dict()) == str(straight.estimate().as_dict())
    with pytest.raises(InputError, match="Remedy: build the estimator with the same"):
        NoiseScale(nn.Linear(2, 2)).load_state_dict(first.state_dict())


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


@pytest.mark.parametrize("source", ["microbatch", "accumulated", "per_example"])
def test_finds_a_known_noise_scale(source):
    model, sample = synthetic(40.0)
    noise = NoiseScale(model, decay=1.0, source=source)
    run(noise, model, sample, 300, [5, 5, 5, 5])
    got = noise.estimate()
    # 12 %: three standard errors at 300 steps of 20 samples.
    assert got.value.item() == pytest.approx(40, rel=0.12)
    assert got.low.item() < 40 < got.high.item()
    assert got.resolved.item()


def test_the_noise_per_sample_survives_a_new_batch_size():
    model, sample = synthetic(40.0)
    noise = NoiseScale(model, decay=1.0)
    run(noise, model, sample, 150, [2] * 4)
    run(noise, model, sample, 150, [16] * 8)
    got = noise.estimate()
    assert got.value.item() == pytest.approx(40, rel=0.12)
    assert got.noise_trace.item() == pytest.approx(40, rel=0.03)


def test_hopeless_data_are_unresolved():
    model, sample = synthetic(1e6)
    noise = NoiseScale(model)
    run(noise, model, sample, 20, [2, 2])
    got = noise.estimate()
    assert not got.resolved.item()
    assert math.isinf(got.high.item())
    assert got.low.item() > 2  # what can be said: far above the batch
    assert NoiseScale(model).estimate().as_dict()["measurements"] == 0


def test_history_keeps_the_newest():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=1.0, history=5)
    run(noise, model, lambda n: sample(n) * 100, 4, [4, 4])
    run(noise, model, sample, 5, [4, 4])
    got = noise.estimate()
    assert got.measurements.item() == 5
    assert got.noise_trace.item() < 100  # nothing of the hundredfold gradients is left
    noise.reset()
    assert noise.estimate().measurements.item() == 0


@pytest.mark.parametrize("source", ["microbatch", "per_example", "accumulated"])
def test_every_third_step_is_measured(source):
    model, x, y = make()
    all_steps, some = NoiseScale(model, source=source), NoiseScale(model, source=source, every=3)
    for i in range(7):
        measure(some, model, x * (1 + i), y, [5, 5])
        if i % 3 == 0:
            measure(all_steps, model, x * (1 + i), y, [5, 5])
    assert some.estimate().measurements.item() == 3
    assert str(some.estimate().as_dict()) == str(all_steps.estimate().as_dict())


def test_decay_forgets_as_it_says():
    model, sample = synthetic(10.0)
    noise = NoiseScale(model, decay=0.5, history=40)
    run(noise, model, sample, 1, [4, 4])
    first = last(noise)[1]
    run(noise, model, sample, 1, [4, 4])
    second = noise.state_dict()["ring"][1, 1].sum().item()
    assert last(noise)[1] == pytest.approx((0.5 * first + second) / 1.5, rel=1e-12)


def nested(noise):
    with noise.microbatch(1), noise.microbatch(1):
        pass


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda n: n.step(), "at least 2 parts a step. Found 0. Remedy: split"),
        (lambda n: n.microbatch(0).__enter__(), "`num_samples`.*integer of at least 1"),
        (lambda n: n.microbatch(1, weight=-1.0).__enter__(), "`weight`"),
        (lambda n: nested(n), "one micro-batch at a time"),
        (lambda n: n.load_state_dict({}), "Expected a state_dict of this estimator"),
    ],
)
def test_bad_calls(act, message):
    noise = NoiseScale(nn.Linear(2, 2))
    with pytest.raises(InputError, match=message):
        act(noise)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "microbatches"}, "Did you mean 'microbatch'"),
        ({"decay": 0.0}, r"`decay`.*\(0, 1\]"),
        ({"metric": "l1"}, "Expected `optimizer` for metric='l1'"),
        ({"accumulation": "none"}, "`accumulation`"),
        ({"history": 1}, "`history`.*at least 3"),
        ({"layers": "norm"}, "`layers` is for source='per_example' only"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(InputError, match=message):
        NoiseScale(nn.Linear(2, 2), **options)


def test_a_gradient_left_over_from_the_step_before_shows():
    model, x, y = make()
    noise = NoiseScale(model)
    for _ in range(5):  # without zero_grad, .grad outgrows the micro-batches
        for a, b in zip(x.split(5), y.split(5), strict=True):
            loss = losses(model, a, b).mean() / 2
            with noise.microbatch(5):
                loss.backward()
        noise.step()
    got = noise.estimate()
    assert got.noise_trace.item() < 0
    assert math.isnan(got.value.item())
    assert not got.resolved.item()


def test_a_model_without_memory_is_refused():
    with pytest.raises(InputError, match="on 'meta'"):
        NoiseScale(nn.Linear(2, 2, device="meta"))


def test_nothing_to_measure():
    with pytest.raises(InputError, match="trainable parameters"):
        NoiseScale(nn.Linear(2, 2).requires_grad_(False))


def test_remove_takes_every_hook_off():
    model, x, y = make()
    for source in ("microbatch", "per_example"):
        noise = NoiseScale(model, source=source)
        measure(noise, model, x, y, [5, 5])
        noise.remove()
    assert all(not p._backward_hooks for p in model.parameters())
    assert all(not m._forward_hooks for m in model.modules())
