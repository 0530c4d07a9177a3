"""A gradient watch in Lightning's own Trainer names planted faults."""

import os

import pytest
import torch

from tests.distributed.ranks import on_ranks
from tests.integrations.by_hand import token_batches
from tests.integrations.pages import blocks, run
from tests.integrations.test_lightning import (
    ACCUMULATION,
    PAGE,
    RANKS,
    Module,
    loader,
    make_trainer,
    names_of,
)

from steadygrad.integrations.lightning import GradientWatchCallback  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:.*isinstance.treespec")
CULPRIT = "model.transformer.h.0.mlp.act"


class Root(torch.nn.Module):
    """Its backward pass divides zero by zero, if it is told to."""

    broken = False

    def forward(self, x):
        return x + (0 * x).abs().sqrt() if self.broken else 2 * x


class Breaks(Module):
    """A module within its first block is at fault in some micro-batches."""

    broken = (6, 10, 18)

    def __init__(self):
        super().__init__()
        self.model.transformer.h[0].mlp.act = Root()

    def training_step(self, batch, batch_idx):
        self.model.transformer.h[0].mlp.act.broken = batch_idx in self.broken
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer, **_):
        """The weights stay finite."""
        for p in self.parameters():
            p.grad.nan_to_num_(0.0)


@pytest.mark.parametrize("accumulation", [1, ACCUMULATION])
def test_a_planted_fault_is_named_once_for_each_row_of_steps(accumulation, tmp_path):
    callback, module = GradientWatchCallback(), Breaks()
    trainer = make_trainer(tmp_path, callback, accumulate_grad_batches=accumulation)
    with pytest.warns(UserWarning, match=r"Batch .*, rank 0: the backward pass of") as warned:
        trainer.fit(module, loader(token_batches(5 * ACCUMULATION)))
    told = [str(each.message) for each in warned if each.category is UserWarning]
    assert told == [str(found) for found in callback.findings]
    # By windows of four, batches 6 and 10 are in a row of two steps.
    batches = [6, 10, 18] if accumulation == 1 else [6, 18]
    assert [found.batch for found in callback.findings] == batches
    assert {found.kind for found in callback.findings} == {"gradient"}
    assert {found.name for found in callback.findings} == {CULPRIT}
    assert callback.watch.batches == 5 * ACCUMULATION


class Calls(Breaks):
    """Calls itself, also to be evaluated between the micro-batches of a window."""

    broken = (2,)

    def forward(self, tokens):
        return self.model(input_ids=tokens)

    def training_step(self, batch, batch_idx):
        self(batch["input_ids"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self(batch["input_ids"])


def test_batches_are_counted_though_the_module_calls_itself(tmp_path):
    callback, data = GradientWatchCallback(), loader(token_batches(ACCUMULATION))
    trainer = make_trainer(tmp_path, callback, val_check_interval=1, num_sanity_val_steps=1)
    with pytest.warns(UserWarning, match=r"Batch 2, rank 0"):
        trainer.fit(Calls(), data, data)
    assert [found.name for found in callback.findings] == [CULPRIT]
    assert callback.watch.batches == ACCUMULATION


def train_on_rank(rank, world, folder):
    os.environ["LOCAL_RANK"] = str(rank)
    module, callback = Breaks(), GradientWatchCallback()
    module.broken = (7,) if rank == 1 else ()
    trainer = make_trainer(folder, callback, devices=world, strategy="ddp")
    with pytest.warns(UserWarning, match="Batch 7, rank 1"):
        trainer.fit(module, loader(token_batches(RANKS * 2 * ACCUMULATION), world, rank))
    return [[found.batch, found.rank, found.kind, found.name] for found in callback.findings]


@pytest.mark.distributed
def test_every_process_is_told_which_of_them_is_at_fault(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path))
    assert found == [[[7, 1, "gradient", CULPRIT]]] * RANKS


def test_the_pages_code_warns(tmp_path):
    names = {**names_of(tmp_path), "model": Breaks()}
    with pytest.warns(UserWarning, match=f"the backward pass of '{CULPRIT}'"):
        found = run(blocks(PAGE, "python")[2], names, PAGE)
    assert [each.batch for each in found["trainer"].callbacks[0].findings] == [6, 18]
