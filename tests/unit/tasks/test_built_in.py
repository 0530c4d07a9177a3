"""Promises of every built-in task, and of the tasks in the examples."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from steadygrad.tasks import BUILT_IN, load_task, mean_loss, to_device
from steadygrad.tasks.check import check_losses

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ["my_task.py", "my_loader_task.py", "my_hf_task.py"]
SPECS = {**{name: name for name in BUILT_IN}, **{n: f"{EXAMPLES / n}:make_task" for n in NAMES}}


@pytest.fixture(scope="module", params=SPECS)
def task(request):
    if request.param == "my_hf_task.py":
        pytest.importorskip("transformers", reason="of the dependency group hf")
    return load_task(SPECS[request.param])


@pytest.fixture
def model(task):
    torch.manual_seed(0)
    return task.make_model()


def test_a_sample_alone_has_the_loss_it_has_in_a_batch(task, model):
    model.eval()
    losses = check_losses(task.per_sample_loss(model, task.train.batch(torch.arange(6))), 6)
    singles = [task.per_sample_loss(model, task.train.batch(torch.tensor([i]))) for i in range(6)]
    # A batch's matrix product sums in another order than a single row's: float32 rounding.
    torch.testing.assert_close(losses, torch.cat(singles), rtol=1e-4, atol=1e-6)


def test_every_parameter_gets_a_gradient(task, model):
    task.per_sample_loss(model, task.train.batch(torch.arange(8))).mean().backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.few(3)
def test_it_trains(task, model):
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    for step in range(100 if task.name not in BUILT_IN else 60):
        indices = torch.arange(task.batch_size) + task.batch_size * step
        batch = task.train.batch(indices % len(task.train))
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mean_loss(task, model) < 0.8 * before


def test_it_runs_in_double_precision(task, model):
    model.double()
    batch = to_device(task.train.batch(torch.arange(4)), model)
    assert task.per_sample_loss(model, batch).dtype == torch.float64


def test_two_loads_are_the_same_task(task, request):
    again = load_task(SPECS[request.node.callspec.params["task"]])
    batches = [tree_leaves(each.train.batch(torch.arange(4))) for each in (task, again)]
    assert all(torch.equal(a, b) for a, b in zip(*batches, strict=True))
    assert (again.lr, again.provenance) == (task.lr, task.provenance)


# Tokens of a sample, and what the record says of the data.
TOKENS = {"char-lm": 64}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_task_says_its_speed_and_origin_and_leads_with_the_batch(name):
    task = load_task(name)
    assert (task.name, task.tokens_per_sample) == (name, TOKENS.get(name))
    assert task.samples_per_second > 0
    assert len(task.provenance["sha256"]) == 64
    assert task.provenance["corpus"]
    # Exact per-example gradient norms read a layer's examples off its leading dimension.
    model, leading = task.make_model(), {}

    def record(layer, inputs, output):
        leading[layer] = len(inputs[0]), len(output)

    layers = [m for m in model.modules() if list(m.parameters(recurse=False))]
    for layer in layers:
        layer.register_forward_hook(record)
    task.per_sample_loss(model, task.train.batch(torch.arange(3)))
    assert leading == dict.fromkeys(layers, (3, 3))
    supported = (nn.Linear, nn.Conv2d, nn.Embedding, nn.LayerNorm)
    assert all(type(layer) in supported for layer in layers)
