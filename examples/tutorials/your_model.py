"""
Which batch size for my own model?
==================================

``steadygrad.advise`` trains a model at several batch sizes, and says which of them cost more data
than they are worth. A function of yours makes the task: a model, data loaders, one loss for each
sample, and a learning rate at your batch size, from which the search begins.

Here the model is a perceptron of scikit-learn's handwritten digits, trained by AdamW at its
default learning rate.
"""

import tempfile
from pathlib import Path
from statistics import fmean

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import steadygrad
from steadygrad.studies.folder import read_run
from steadygrad.studies.paired import SEEDS
from steadygrad.studies.schema import Training
from steadygrad.tasks import Task


class Classifier(nn.Module):
    """Your model."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.head = nn.Linear(64, 64), nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits with shape (n, 10)."""
        return self.head(F.gelu(self.hidden(images)))


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Your loss, one for each sample: not their mean."""
    images, labels = batch
    return F.cross_entropy(model(images), labels, reduction="none")


def make_adamw(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True)


def make_task() -> Task:
    digits = load_digits()
    images, labels = torch.tensor(digits.data).float() / 16, torch.tensor(digits.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, valid = (TensorDataset(images[i], labels[i]) for i in (order[:1400], order[1400:]))
    return Task.from_dataloader(
        DataLoader(train, batch_size=8, shuffle=True),
        valid=DataLoader(valid, batch_size=8),
        make_model=Classifier,
        per_sample_loss=losses,
        make_optimizer=make_adamw,
        lr=1e-3,  # at the loader's batch size: the search begins there
        lr_rule="sqrt",  # and at larger ones by this rule, as suits Adam
        name="digits",
        sample="image",
    )


# %%
# Run it
# ------
#
# ``samples`` is the length of the training that the advice is for: yours, in steps times batch
# size. ``seeds`` bounds the study, so that it is the same on every machine. Leave it out of your
# own: then more trainings are added until the budget is over.

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder, "run")
    result = steadygrad.advise(
        make_task(), samples=2000, seeds=15, budget="5m", threads=1, out=out, progress=False
    )
    run = read_run(out)  # all that was measured; the folder has report.html as well

print(result)

# %%
# As the last line of a notebook's cell, ``result`` is the page, while its folder is there;
# ``result.summary`` has every number by name. With the code above in a file ``digits_task.py`` the
# same study is
#
# .. code-block:: sh
#
#    steadygrad advise digits_task.py:make_task --samples 2000 --budget 5m
#
# which, like ``steadygrad.advise("digits_task.py:make_task")``, can train on several workers.

best = result.summary.recommendation
print(f"batch size {best.batch_size}, learning rate {best.lr:.3g}, over {best.samples:,} images")

# %%
# How to read it
# --------------
#
# - The first sentence is the answer for a whole run of so many images. It rests on runs from the
#   initial weights, each beside one of your own batch size with the same seed. "Needs 10% more
#   images" is the price of the larger batch: that much more data for the same loss. Up to 20 % is
#   tolerated, which ``--tolerance`` changes.
# - The learning rate of the smallest batch was searched, with seeds that no comparison has, and the
#   others' follow from it by ``lr_rule``. At a rate that is too low a larger batch would look good
#   for its larger rate alone.
#
# On the left is how many more images each batch size needs than the smallest, with its confidence
# interval; a triangle where that has no end. On the right is the search: mean losses of the
# smallest batch by learning rate.

figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
checked = result.summary.checked
for place, found in enumerate(checked):
    # What is beyond 60 % is not known.
    low, middle, high = (100 * min(x, 0.6) for x in (found.low, found.overhead, found.high))
    left.plot([place] * 2, [low, high], "_-", color="C0")
    left.plot(place, middle, "o" if found.high <= 0.6 else "^", color="C0")
left.axhline(100 * run.header.settings.tolerance, color="0.4", linestyle="--", label="tolerated")
left.set(xlabel="batch size", ylabel="more images, %", xlim=(-1, len(checked)))
left.set_xticks(range(len(checked)), [str(found.batch_size) for found in checked])
left.legend(frameon=False)
trainings = run.results.select(Training)
searched = [training for training in trainings if training.seed in SEEDS]
rates = sorted({training.lr for training in searched})
means = [fmean(one.loss for one in searched if one.lr == rate) for rate in rates]
right.plot(rates, means, "o-", label=f"batch {run.header.plan.arms[0]}")
right.set(xlabel="learning rate", ylabel="loss", xscale="log")
right.legend(frameon=False)

# %%
# What a small budget cannot tell
# -------------------------------

passes = run.header.plan.samples / run.header.task.train_size
print(f"length of a run: {passes:.1f} passes over the training data")
print(f"runs: {len(trainings)}, {run.header.plan.seeds} seeds of a batch size at most")
print(f"largest batch that was trained: {max(found.batch_size for found in checked)} images")

# %%
# - Advice from runs of this length says little about one that is ten times as long: give the study
#   your own ``samples``, and the budget for them.
# - With few seeds and small unseen data an interval is wide. Where "not known" or "uncertain" is
#   printed, take it at its word.
# - Larger batch sizes than those that were trained are not judged at all.
# - Nothing here is about time: whether half of the steps are worth the extra images depends on
#   what your machine does with a larger batch.
#
# What to do with the answer
# --------------------------
#
# - Train at the batch size and the rate of the first line, with its warm-up.
# - ``steadygrad advise --budget 1h`` on a task without ``samples_per_second`` plans what that time
#   allows. Its :doc:`page </advise>` has all that is measured, and :doc:`/tasks` other ways to make
#   a task.
