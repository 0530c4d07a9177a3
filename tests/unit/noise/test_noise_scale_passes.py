"""`NoiseScale` finds its own micro-batches, and says what it says with contexts, to the bit."""

import copy
import gc
import io

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from steadygrad._checks import InputError
from steadygrad.noise import NoiseScale
from tests.reference import noise_scale as reference
from tests.unit.noise.test_noise_scale_models import Tied, token_losses
from tests.unit.noise.training_loop import COUNTS, EXACT, last, losses, make, per_sample


def found(noise):
    """Every kept measurement, to the bit."""
    return noise.state_dict()["ring"]


def with_contexts(noise, backwards, sizes):
    for backward, size in zip(backwards, sizes, strict=True):
        with noise.microbatch(size):
            backward()
    noise.step()


def told_before(noise, backwards, sizes):
    for backward, size in zip(backwards, sizes, strict=True):
        noise.samples(size)
        backward()
    noise.step()


def alone(noise, backwards, sizes):
    for backward in backwards:
        backward()
    noise.step()


def three_ways(model, backwards, sizes, **options):
    """The measurements with contexts, with sizes told, and with a function that knows them."""
    results = []
    sizes_left = iter(sizes * 3)
    for run, samples in [
        (with_contexts, None),
        (told_before, None),
        (alone, lambda: next(sizes_left)),
    ]:
        noise = NoiseScale(model, samples=samples, **options)
        for _ in range(3):
            model.zero_grad()
            run(noise, backwards, sizes)
        results.append(found(noise))
        assert (noise.skipped.item(), noise.altered.item()) == (0, 0)
        noise.remove()
    return results


@pytest.mark.parametrize("metric", ["euclidean", "preconditioned"])
def test_micro_batches_are_found(metric):
    model, x, y = make()
    optimizer = torch.optim.Adam(model.parameters())
    losses(model, x, y).mean().backward()
    optimizer.step()
    pairs = zip(x.split(COUNTS), y.split(COUNTS), strict=True)
    backwards = [lambda a=a, b=b: (losses(model, a, b).mean() / 3).backward() for a, b in pairs]
    contexts, told, called = three_ways(
        model, backwards, COUNTS, metric=metric, optimizer=optimizer
    )
    assert torch.isfinite(contexts[:3]).all()
    assert torch.equal(told, contexts)
    assert torch.equal(called, contexts)


def test_and_are_right():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    for a, b in zip(x.split(5), y.split(5), strict=True):
        (losses(model, a, b).mean() / 2).backward()
    noise.step()
    expected = reference.signal_and_noise(per_sample(model, x, y), [5, 5], [1.0, 1.0])
    assert last(noise) == pytest.approx(expected, rel=EXACT)


@pytest.mark.parametrize("mode", [None, False], ids=["plain", "checkpointed"])
def test_tied_weights_and_checkpointing(mode):
    torch.manual_seed(0)
    model, x = Tied(mode).double(), torch.randint(7, (6, 5))
    parts = x.split([2, 4])
    backwards = [lambda p=p: (token_losses(model, p).mean() / 2).backward() for p in parts]
    contexts, told, called = three_ways(model, backwards, [2, 4])
    assert torch.isfinite(contexts[:3]).all()
    assert torch.equal(told, contexts)
    assert torch.equal(called, contexts)


class Reentrant(nn.Module):
    """A body whose forward pass is repeated in a backward pass of its own; with or without head."""

    def __init__(self, head=True):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.head = nn.Linear(2, 2).requires_grad_(head)

    def forward(self, x):
        x = x.clone().requires_grad_()
        for layer in self.body:
            x = checkpoint(layer, x, use_reentrant=True)
        return self.head(x)


def test_reentrant_checkpoints_belong_to_the_pass_around_them():
    _, x, y = make()
    model = Reentrant().double()
    pairs = zip(x.split(5), y.split(5), strict=True)
    backwards = [lambda a=a, b=b: (losses(model, a, b).mean() / 2).backward() for a, b in pairs]
    contexts, told, called = three_ways(model, backwards, [5, 5])
    assert torch.isfinite(contexts[:3]).all()
    assert torch.equal(told, contexts)
    assert torch.equal(called, contexts)


def test_reentrant_checkpoints_alone_are_refused():
    _, x, y = make()
    model = Reentrant(head=False).double()
    noise = NoiseScale(model, samples=10)
    with pytest.raises(InputError, match="use_reentrant"):
        losses(model, x, y).mean().backward()
    noise.remove()


def test_parts_may_use_other_parameters():
    """As experts do: what ends a part is the end of its pass, not a parameter seen twice."""
    torch.manual_seed(0)
    experts = nn.ModuleList([nn.Linear(3, 2), nn.Linear(3, 2)]).double()
    data = torch.randn(2, 4, 3, dtype=torch.float64)
    backwards = [lambda i=i: (experts[i](data[i]).square().mean() / 2).backward() for i in (0, 1)]
    contexts, told, called = three_ways(experts, backwards, [4, 4])
    assert torch.isfinite(contexts[:3]).all()
    assert torch.equal(told, contexts)
    assert torch.equal(called, contexts)


@pytest.mark.parametrize("every", [1, 3])
def test_steps_in_between_cost_nothing_and_change_nothing(every):
    model, x, y = make()
    noises = [NoiseScale(model, every=every), NoiseScale(model, every=every, samples=5)]
    for _ in range(4):
        model.zero_grad()
        for a, b in zip(x.split(5), y.split(5), strict=True):
            with noises[0].microbatch(5):
                (losses(model, a, b).mean() / 2).backward()
        for noise in noises:
            noise.step()
    assert torch.equal(found(noises[0]), found(noises[1]))
    assert noises[1].estimate().measurements.item() == len(range(0, 4, every))


def fail_halfway(model, x, y):
    """A backward pass that dies after some parameters have received their gradients."""
    hidden = model[:2](x)
    hidden.register_hook(lambda _: 1 / 0)
    loss = (model[2:](hidden) - y).square().sum(-1).mean() / 2
    with pytest.raises(ZeroDivisionError):
        loss.backward()


def test_a_pass_that_failed_spoils_only_its_step():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    for failing in (False, True, False):
        model.zero_grad()
        if failing:
            fail_halfway(model, x[:5], y[:5])
        for a, b in zip(x.split(5), y.split(5), strict=True):
            (losses(model, a, b).mean() / 2).backward()
        noise.step()
    ring = found(noise)
    assert torch.isfinite(ring[:3]).flatten(1).all(1).tolist() == [True, False, True]
    assert torch.equal(ring[0], ring[2])
    assert noise.altered.item() == 0


def test_a_pass_that_failed_last_spoils_its_step_too():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    for a, b in zip(x.split(5), y.split(5), strict=True):
        (losses(model, a, b).mean() / 2).backward()
    fail_halfway(model, x[:5], y[:5])
    noise.step()
    assert (noise.skipped.item(), noise.altered.item()) == (1, 0)


def test_a_weight_on_the_device_equals_the_number():
    """A count of tokens; a micro-batch of padding alone weighs nothing."""
    model, x, y = make()
    tokens = torch.tensor([4, 9, 0])
    numbers, tensors = NoiseScale(model), NoiseScale(model)
    for a, b, n, t in zip(x.split(COUNTS), y.split(COUNTS), COUNTS, tokens, strict=True):
        if t > 0:
            with numbers.microbatch(n, weight=t.item() / 13):
                (losses(model, a, b).mean() * t.item() / 13).backward()
    numbers.step()
    model.zero_grad()
    for a, b, n, t in zip(x.split(COUNTS), y.split(COUNTS), COUNTS, tokens, strict=True):
        tensors.samples(n, weight=t / tokens.sum())
        (losses(model, a, b).mean() * t / tokens.sum()).backward()
    tensors.step()
    # 1e-6: the weights are quotients in float32 here.
    assert last(tensors) == pytest.approx(last(numbers), rel=1e-6)


def test_a_negative_weight_on_the_device_leaves_the_step_out():
    model, x, y = make()
    noise = NoiseScale(model)
    for weight in (0.8, -0.2):
        noise.samples(5, weight=torch.tensor(weight))
        (losses(model, x[:5], y[:5]).mean() * weight).backward()
    noise.step()
    assert (noise.skipped.item(), noise.altered.item()) == (1, 0)


@pytest.mark.parametrize("source", ["per_example", "accumulated"])
def test_other_sources_ask_for_the_context(source):
    model, x, y = make()
    noise = NoiseScale(model, source=source, samples=5)
    for a, b in zip(x.split(5), y.split(5), strict=True):
        noise.samples(5)
        (losses(model, a, b).mean() / 2).backward()
    with pytest.raises(InputError, match=r"noise\.microbatch"):
        noise.step()


@pytest.mark.parametrize("samples", [0, 2.5, "4", True])
def test_a_size_that_is_none_is_refused(samples):
    with pytest.raises(InputError, match="samples"):
        NoiseScale(nn.Linear(2, 2), samples=samples)


@pytest.mark.filterwarnings(r"ignore:Using backward\(\) with create_graph")
def test_gradients_of_gradients_leave_no_graph_behind():
    model, x, y = make()
    plain, noise = NoiseScale(model), NoiseScale(model, samples=5)
    for a, b in zip(x.split(5), y.split(5), strict=True):
        loss = losses(model, a, b).mean() / 2
        with plain.microbatch(5):
            loss.backward(create_graph=True)
    plain.step()
    noise.step()
    assert torch.equal(found(plain), found(noise))
    assert not found(noise).requires_grad
    for p in model.parameters():
        p.grad = None  # or the graph refers to itself


def test_large_gradients_are_not_held_and_yet_compared():
    """Autograd adds to the first one in place, where nobody holds it."""
    torch.manual_seed(0)
    model = nn.Linear(300, 300).double()
    noise = NoiseScale(model, samples=4)
    for x in torch.randn(3, 4, 300, dtype=torch.float64):
        (model(x).square().mean() / 3).backward()
    noise.step()
    assert (noise.skipped.item(), noise.altered.item()) == (0, 0)


def test_a_copied_model_is_not_measured():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    losses(copy.deepcopy(model), x, y).mean().backward()
    assert noise._sums.parts == 0


def asked_before(model, loss):
    """An adaptive weight, as of VQGAN: the gradient of the last layer is asked for."""
    torch.autograd.grad(loss, [*model.parameters()][-1], retain_graph=True)


@pytest.mark.parametrize("run", [with_contexts, told_before, alone])
def test_gradients_that_autograd_hands_out_are_no_micro_batch(run):
    model, x, y = make(seed=0)
    results = []
    for asked in (False, True):

        def backward(half, asked=asked):
            loss = losses(model, x[half], y[half]).mean() / 2
            if asked:
                asked_before(model, loss)
            loss.backward()

        noise = NoiseScale(model, samples=3 if run is alone else None)
        for _ in range(2):
            model.zero_grad()
            halves = [slice(0, 3), slice(3, 6)]
            run(noise, [lambda h=h: backward(h) for h in halves], [3, 3])
        assert (noise.skipped.item(), noise.altered.item()) == (0, 0)
        results.append(found(noise))
        noise.remove()
    assert torch.equal(*results)


@pytest.mark.parametrize("source", ["microbatch", "per_example"])
def test_a_dropped_estimator_leaves_no_hooks(source):
    model, _x, _y = make(seed=0)

    def hooks():
        of_modules = sum(len(m._forward_hooks) for m in model.modules())
        return of_modules + sum(len(p._backward_hooks or ()) for p in model.parameters())

    noise = NoiseScale(model, source=source)
    assert hooks() > 0
    del noise
    gc.collect()
    assert hooks() == 0


def test_a_dropped_step_leaves_nothing_behind():
    """A loop that throws gradients away, and goes on with the next batch."""
    model, x, y = make(seed=0)
    results = []
    for dropped in (False, True):
        noise = NoiseScale(model, samples=3)
        for number in range(3):
            model.zero_grad()
            if dropped and number == 1:
                losses(model, x, y).sum().backward()
                model.zero_grad()
                noise.drop_step()
            for half in (slice(0, 3), slice(3, 6)):
                (losses(model, x[half], y[half]).mean() / 2).backward()
            noise.step()
        assert (noise.skipped.item(), noise.altered.item()) == (0, 0)
        results.append(found(noise))
        noise.remove()
    assert torch.equal(*results)


class Heads(nn.Module):
    """A body and two heads, of the same samples."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())
        self.heads = nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        h = self.body(x)
        return [head(h) for head in self.heads]


def apart(a, b):
    a.backward(retain_graph=True)
    b.backward()


def kept_apart(a, b):
    for loss in (a, b):
        loss.backward(retain_graph=True)


def summed(a, b):
    (a + b).backward()


def repeated(backward, around="no context", source="microbatch", steps=1):
    """Steps of two micro-batches, each with two losses of one forward pass."""
    torch.manual_seed(0)
    model = Heads().double()
    noise = NoiseScale(model, source=source, samples=4 if around == "no context" else None)
    for x in torch.randn(steps, 2, 4, 3, dtype=torch.float64):
        model.zero_grad()
        for half in x:
            a, b = (out.square().mean() / 2 for out in model(half))
            if around == "both":
                with noise.microbatch(4):
                    backward(a, b)
            elif around == "each":
                with noise.microbatch(4):
                    a.backward(retain_graph=True)
                with noise.microbatch(4):
                    b.backward()
            else:
                backward(a, b)
        noise.step()
    return noise


@pytest.mark.parametrize("backward", [apart, kept_apart])
@pytest.mark.parametrize(
    ("around", "source"),
    [("no context", "microbatch"), ("each", "microbatch"), ("each", "accumulated")],
)
def test_two_backward_passes_over_one_forward_pass_are_refused(backward, around, source):
    with pytest.raises(InputError, match="same samples"):
        repeated(backward, around, source)


def test_or_added_up_in_one_context():
    """By the difference that both make to `.grad`; 1e-12: it is a difference."""
    together = repeated(summed, steps=3)
    for backward in (apart, kept_apart):
        added = repeated(backward, "both", "accumulated", steps=3)
        assert torch.allclose(found(added), found(together), rtol=1e-12)


def test_a_graph_that_is_kept_for_nothing_changes_nothing():
    """Nor one that is asked for gradients, nor one whose beginning all micro-batches share."""
    torch.manual_seed(0)
    shared, body = nn.Linear(3, 3).double(), nn.Linear(3, 2).double()
    model, x = nn.ModuleList([shared, body]), torch.randn(3, 4, 3, dtype=torch.float64)
    results = []
    for way in ("plain", "kept", "asked", "all first"):
        noise = NoiseScale(model, samples=4)
        for _ in range(2):
            model.zero_grad()
            weight = shared(torch.eye(3, dtype=torch.float64))
            losses = [body(part @ weight).square().mean() / 3 for part in x]
            if way == "asked":
                [
                    torch.autograd.grad(loss, [*body.parameters()], retain_graph=True)
                    for loss in losses
                ]
            if way == "all first":
                [
                    torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
                    for loss in losses
                ]
            for number, loss in enumerate(losses):
                loss.backward(retain_graph=way == "kept" or number < 2)
            noise.step()
        assert noise.skipped.item() == 0
        results.append(found(noise))
        noise.remove()
    assert all(torch.equal(result, results[0]) for result in results)


def test_a_measured_model_is_copied_and_saved_like_any_other():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        apart(losses(other, x, y).mean(), losses(other, x, y).mean())
    assert noise._sums.parts == 0


def test_passes_without_a_step_hold_no_memory():
    model, x, y = make()
    noise = NoiseScale(model, samples=5)

    def held():
        for _ in range(40):
            losses(model, x, y).mean().backward()
        gc.collect()
        return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())

    held()
    before = held()
    assert held() == before
    assert noise._sums.parts == 120


@pytest.mark.parametrize("run", [with_contexts, told_before, alone])
def test_a_micro_batch_without_samples_is_no_part(run):
    model, x, y = make(seed=0)
    results = []
    for sizes in ([5, 5], [0, 5, 5], [5, 0, 5, 0]):
        counts = iter(sizes)
        noise = NoiseScale(model, samples=(lambda c=counts: next(c)) if run is alone else None)
        model.zero_grad()
        halves = iter(zip(x.split(5), y.split(5), strict=True))
        pairs = [next(halves) if size else (x, y) for size in sizes]
        backwards = [
            lambda a=a, b=b, n=n: (losses(model, a, b).mean() * (n > 0) / 2).backward()
            for (a, b), n in zip(pairs, sizes, strict=True)
        ]
        run(noise, backwards, sizes)
        assert (noise.skipped.item(), noise.altered.item()) == (0, 0)
        results.append(found(noise))
        noise.remove()
    assert torch.equal(results[1], results[0])
    assert torch.equal(results[2], results[0])


def test_what_a_micro_batch_without_samples_adds_all_the_same_is_noticed():
    model, x, y = make(seed=0)
    noise = NoiseScale(model)
    with pytest.warns(UserWarning, match="noise.altered"):
        told_before(
            noise, [losses(model, x.clone(), y).mean().backward for _ in range(3)], [5, 0, 5]
        )
    assert (noise.skipped.item(), noise.altered.item()) == (1, 1)


@pytest.mark.parametrize(
    ("kind", "source", "metric"),
    [
        (nn.Embedding, "microbatch", "euclidean"),
        (nn.Embedding, "microbatch", "preconditioned"),
        (nn.EmbeddingBag, "accumulated", "euclidean"),
        (nn.Embedding, "accumulated", "preconditioned"),
        (nn.Embedding, "per_example", "euclidean"),
    ],
)
def test_sparse_gradients_are_measured_like_dense_ones(kind, source, metric):
    rows, x = [], torch.randint(9, (3, 2, 4, 5))
    for sparse in (False, True):
        torch.manual_seed(0)
        table = kind(9, 4, sparse=sparse)
        model = nn.ModuleList([table, nn.Linear(4, 1)]).double()
        optimizer = Moved(model)
        noise = NoiseScale(model, source=source, metric=metric, optimizer=optimizer)
        for step in x:
            model.zero_grad()
            for part in step:
                with noise.microbatch(4):
                    h = table(part)
                    (model[1](h if h.dim() == 2 else h.mean(1)).square().mean() / 2).backward()
            assert model[0].weight.grad.is_sparse is sparse
            noise.step()
        assert (noise.skipped.item(), noise.altered.item()) == (0, 0)
        rows.append(found(noise))
    # 1e-12: rows are added up in another order.
    assert torch.allclose(*rows, rtol=1e-12)
    assert rows[0].abs().sum() > 0


class Moved(torch.optim.SGD):
    """An optimizer whose moments are there from the beginning."""

    def __init__(self, model):
        super().__init__(model.parameters(), lr=0.0)
        for p in model.parameters():
            self.state[p] = {"square_avg": torch.ones_like(p)}


def test_a_short_last_window_is_left_out():
    """At an epoch's end there may be one micro-batch; a first step with one is a mistake."""
    model, x, y = make(seed=0)
    noise = NoiseScale(model, samples=3)

    def take(*halves):
        model.zero_grad()
        for half in halves:
            (losses(model, x[half], y[half]).mean() / len(halves)).backward()
        noise.step()

    with pytest.raises(InputError, match="at least 2 parts"):
        take(slice(0, 3))
    take(slice(0, 3), slice(3, 6))
    before = found(noise).clone()
    take(slice(0, 3))
    assert (noise.skipped.item(), noise.altered.item()) == (1, 0)
    assert noise.estimate().measurements == 1
    take(slice(0, 3), slice(3, 6))
    assert noise.estimate().measurements == 2
    assert before.shape == found(noise).shape
