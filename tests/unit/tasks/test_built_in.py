"""Promises of every built-in task, the example included."""

from pathlib import Path

import pytest
import torch
from torch import nn

from steadygrad.tasks import BUILT_IN, load_task, mean_loss, to_device
from steadygrad.tasks.check import check_losses

EXAMPLE = Path(__file__).parents[3] / "examples" / "my_task.py"
SPECS = [*BUILT_IN, f"{EXAMPLE}:make_task"]


@pytest.fixture(scope="module", params=SPECS, ids=[*BUILT_IN, "example"])
def task(request):
    return load_task(request.param)


@pytest.fixture
def model(task):
    torch.manual_seed(0)
    return task.make_model()


def test_its_losses_are_one_a_sample(task, model):
    losses = check_losses(task.per_sample_loss(model, task.train.batch(torch.arange(5))), 5)
    singles = [task.per_sample_loss(model, task.train.batch(torch.tensor([i]))) for i in range(5)]
    # A batch's matrix product sums in another order than a single row's: float32 rounding.
    torch.testing.assert_close(losses, torch.cat(singles), rtol=1e-4, atol=1e-6)


def test_per_sample_losses_average_to_the_evaluation(task, model):
    with torch.no_grad():
        losses = task.per_sample_loss(model, task.valid.batch(torch.arange(len(task.valid))))
    assert mean_loss(task, model) == pytest.approx(losses.double().mean().item(), rel=1e-5)


def test_the_batch_leads_in_every_layer(task, model):
    """Exact per-example gradient norms read a layer's examples off its leading dimension."""
    leading: dict[str, int] = {}

    def hook(name):
        def record(module, inputs, output):
            leading[name] = inputs[0].shape[0]
            assert output.shape[0] == inputs[0].shape[0]

        return record

    layers = {
        n: m
        for n, m in model.named_modules(remove_duplicate=True)
        if list(m.parameters(recurse=False))
    }
    for name, layer in layers.items():
        layer.register_forward_hook(hook(name))
    task.per_sample_loss(model, task.train.batch(torch.arange(3)))
    assert leading == dict.fromkeys(layers, 3)
    supported = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm)
    assert all(type(layer) in supported for layer in layers.values())


def test_every_parameter_gets_a_gradient(task, model):
    task.per_sample_loss(model, task.train.batch(torch.arange(8))).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.few(1)
def test_it_trains(task, model):
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        indices = torch.randint(len(task.train), (task.batch_size,), generator=generator)
        losses = check_losses(task.per_sample_loss(model, task.train.batch(indices)), len(indices))
        losses.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mean_loss(task, model) < 0.8 * before


def test_it_runs_in_double_precision(task, model):
    model.double()
    batch = to_device(task.train.batch(torch.arange(4)), model)
    assert task.per_sample_loss(model, batch).dtype == torch.float64


def test_two_loads_are_the_same_task(task, request):
    again = load_task(request.node.callspec.params["task"])
    pairs = zip(
        flat(task.train.batch(torch.arange(4))),
        flat(again.train.batch(torch.arange(4))),
        strict=True,
    )
    assert all(torch.equal(a, b) for a, b in pairs)
    assert (again.lr, again.provenance) == (task.lr, task.provenance)


def flat(batch):
    return [batch] if isinstance(batch, torch.Tensor) else list(batch)


def test_built_ins_say_their_speed_and_origin():
    for name, make in BUILT_IN.items():
        task = make()
        assert task.name == name
        assert task.samples_per_second > 0
        assert len(task.provenance["sha256"]) == 64
        assert task.provenance["corpus"]


def test_a_language_model_says_its_tokens():
    found = {name: make().tokens_per_sample for name, make in BUILT_IN.items()}
    assert found == {
        "char-lm": 64,
        "digits-classifier": None,
        "digits-autoencoder": None,
        "digits-deep": None,
    }
    train = load_task("char-lm").train
    assert train.batch(torch.arange(2))[0].shape == (2, 64)
