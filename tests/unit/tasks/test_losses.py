"""Per-sample losses: one finite loss a sample, and their mean over a data set."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.tasks import TensorSamples, mean_loss
from steadygrad.tasks.check import check_losses
from tests.unit.tasks import tiny
from tests.unit.tasks.tiny import squared

ROWS = torch.randn(7, 3, generator=torch.Generator().manual_seed(0))
TASK = replace(tiny.TASK, valid=TensorSamples(ROWS))


def losses(*values: float) -> torch.Tensor:
    return torch.tensor(values, requires_grad=True)


def test_good_losses_come_back_themselves():
    good = losses(1.0, 2.0)
    assert check_losses(good, 2) is good
    with torch.no_grad():
        assert check_losses(good.detach(), 2).tolist() == [1.0, 2.0]


@pytest.mark.parametrize(
    ("bad", "found"),
    [
        (losses(1.0, 2.0).mean(), r"shape \(\): a loss that is already a mean.*reduction='none'"),
        (losses(1.0), r"shape \(1,\): a loss that is already a mean"),
        (losses(1.0, 2.0)[:, None], r"shape \(2, 1\)\. Remedy: average over every dimension"),
        (losses(1.0, 2.0, 3.0), r"with shape \(2,\)\. Found shape \(3,\)"),
        (losses(1.0, 2.0).mean(), "Task.from_hf"),
        ({"loss": losses(1.0).mean()}, "Found dict.*Task.from_hf"),
        (1.5, "Found float"),
        (torch.tensor([1, 2]), "Found torch.int64"),
        (torch.ones(2), "without a gradient.*detach.*requires_grad=False"),
        (losses(1.0, float("nan")), "Found 1 that are NaN or infinite.*lower learning rate"),
        (losses(float("inf"), float("-inf")), "Found 2 that are NaN or infinite"),
    ],
)
def test_bad_losses_are_refused_with_a_remedy(bad, found):
    with pytest.raises(InputError, match=found) as caught:
        check_losses(bad, 2)
    assert "Remedy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_batch_of_one_still_needs_its_dimension():
    with pytest.raises(InputError, match="already a mean"):
        check_losses(losses(1.0).mean(), 1)
    assert check_losses(losses(1.0), 1).shape == (1,)


@pytest.mark.parametrize("size", [1, 3, 7, 128])
def test_the_mean_does_not_depend_on_the_micro_batch(size):
    model = nn.Linear(3, 2)
    expected = squared(model.double(), ROWS.double()).mean().item()
    # In float64 the order of the summation is all that differs.
    assert mean_loss(TASK, model, micro_batch_size=size) == pytest.approx(expected, rel=1e-14)


def test_other_samples_than_the_validation_set():
    model = nn.Linear(3, 2)
    expected = squared(model, torch.ones(10, 3)).mean().item()
    # float32 losses: about 1e-7 each.
    assert mean_loss(TASK, model, TASK.train) == pytest.approx(expected, rel=1e-6)
    assert mean_loss(TASK, model) != pytest.approx(expected, rel=1e-3)


def test_evaluation_mode_and_no_gradients_then_everything_as_before():
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5), nn.Dropout(0.5))
    model[2].eval()
    seen = []

    def watched(inner, batch):
        seen.append((torch.is_grad_enabled(), *(m.training for m in inner.modules())))
        return squared(inner, batch)

    first, second = (mean_loss(replace(TASK, per_sample_loss=watched), model) for _ in range(2))
    assert first == second
    assert set(seen) == {(False, False, False, False, False)}
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert torch.is_grad_enabled()


def test_modes_come_back_after_an_error():
    model = nn.Linear(3, 2)
    mean = replace(TASK, per_sample_loss=lambda m, batch: squared(m, batch).mean())
    with pytest.raises(InputError, match="already a mean"):
        mean_loss(mean, model)
    assert model.training


def test_a_diverged_model_has_a_mean_that_says_so():
    model = nn.Linear(3, 2)
    nn.init.constant_(model.bias, float("nan"))
    assert mean_loss(TASK, model) != mean_loss(TASK, model)


def test_the_tasks_micro_batch_is_the_default():
    sizes = []

    def watched(model, batch):
        sizes.append(len(batch))
        return squared(model, batch)

    task = replace(TASK, per_sample_loss=watched, micro_batch_size=3)
    mean_loss(task, nn.Linear(3, 2))
    mean_loss(replace(task, micro_batch_size=None), nn.Linear(3, 2))
    mean_loss(task, nn.Linear(3, 2), micro_batch_size=5)
    assert sizes == [3, 3, 1, 7, 5, 2]


def test_a_mean_that_was_expanded_is_still_a_mean():
    losses = torch.rand(4, requires_grad=True).mean().expand(4)
    with pytest.raises(InputError, match="already a mean"):
        check_losses(losses, 4)
