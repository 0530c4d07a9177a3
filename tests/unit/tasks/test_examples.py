"""The tasks in the examples train; ``my_task.py`` is among those of ``test_built_in`` too."""

from pathlib import Path

import pytest
import torch

from steadygrad.tasks import load_task, mean_loss

EXAMPLES = Path(__file__).parents[3] / "examples"
NAMES = ["my_task.py", "my_loader_task.py", "my_hf_task.py"]


@pytest.fixture(params=NAMES)
def task(request):
    if request.param == "my_hf_task.py":
        pytest.importorskip("transformers", reason="of the dependency group hf")
    return load_task(f"{EXAMPLES / request.param}:make_task")


def test_a_sample_alone_has_the_loss_it_has_in_a_batch(task):
    torch.manual_seed(0)
    model = task.make_model().eval()
    together = task.per_sample_loss(model, task.train.batch(torch.arange(6)))
    alone = [task.per_sample_loss(model, task.train.batch(torch.tensor([i]))) for i in range(6)]
    # float32: another order of the sums.
    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-5)


def test_it_trains(task):
    torch.manual_seed(0)
    model = task.make_model()
    before = mean_loss(task, model)
    optimizer = task.optimizer(model, task.lr)
    for step in range(100):
        indices = torch.arange(8 * step, 8 * step + 8)
        task.per_sample_loss(model, task.train.batch(indices)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert mean_loss(task, model) < 0.8 * before
