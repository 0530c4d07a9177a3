"""Trainers that call `loss.backward()` themselves: a loop of their kind, and theirs if installed.

Each divides the loss by the number of micro-batches, scales it if there is a scaler, and steps
once after all of them. They are held to a loop in which each of these is written out.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, SequentialSampler, TensorDataset

from steadygrad import LossBalancer
from tests.unit.balance.problems import (
    WEIGHTS,
    averages_of,
    draw,
    losses_of,
    make_model,
    mass_of,
    parameters_of,
)

X, TARGET = draw(32, 5, dtype=torch.float32), draw(32, 7, seed=1, dtype=torch.float32)
ITEMS, RATE = 8, 0.01
MICRO = pytest.mark.parametrize("micro", [1, 2])


class Module(nn.Module):
    """A model with its balancer, whose forward pass returns a loss."""

    def __init__(self, micro):
        super().__init__()
        self.model = make_model(torch.float32)
        self.balancer = LossBalancer(WEIGHTS, accumulation_steps=micro)

    def forward(self, x, labels, scaler=None):
        ys = self.balancer.fork(self.model(x), grad_scale=scaler)
        return {"loss": sum(losses_of(ys, labels).values())}


def by_hand(micro):
    """Without fork, scale or division: `backward`, and a sum of what the micro-batches give."""
    model, balancer = make_model(torch.float32), LossBalancer(WEIGHTS)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for i, (x, target) in enumerate(zip(X.split(ITEMS), TARGET.split(ITEMS), strict=True), 1):
        y = model(x)
        losses = losses_of(dict.fromkeys(WEIGHTS, y), target)
        divided = {k: v / micro for k, v in losses.items()}
        balancer.backward(divided, y, accumulation_steps=micro)
        if i % micro == 0:
            optimizer.step()
            optimizer.zero_grad()
    return parameters_of(model), balancer


def assert_as_by_hand(module, micro, tolerance):
    expected, balancer = by_hand(micro)
    got = parameters_of(module.model)
    torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)
    assert not torch.equal(got, parameters_of(make_model(torch.float32)))
    found = averages_of(module.balancer)
    torch.testing.assert_close(found, averages_of(balancer), rtol=1e-6, atol=0)
    # As many steps as the optimizer's, not as micro-batches.
    assert torch.equal(mass_of(module.balancer), mass_of(balancer))


@MICRO
@pytest.mark.parametrize("scaled", [False, True])
def test_a_loop_of_their_kind(micro, scaled):
    module = Module(micro)
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=scaled)
    for i, (x, target) in enumerate(zip(X.split(ITEMS), TARGET.split(ITEMS), strict=True), 1):
        loss = module(x, target, scaler)["loss"]
        scaler.scale(loss / micro).backward()
        if i % micro == 0:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1e6)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    # Powers of two change no digit, and the order of micro-batches is the same.
    assert_as_by_hand(module, micro, 0)


@MICRO
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_lightning(micro, scaled, tmp_path):
    lightning = pytest.importorskip("lightning")
    plugins = pytest.importorskip("lightning.pytorch.plugins")

    class Scaled(plugins.MixedPrecision):
        """Its scaler alone: float16's rounding would hide what is looked for."""

        def forward_context(self):
            return contextlib.nullcontext()

    class Lit(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Module(micro)

        def training_step(self, batch, index):
            scaler = getattr(self.trainer.precision_plugin, "scaler", None)
            return self.inner(*batch, scaler)["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=RATE)

    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    lit = Lit()
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        accumulate_grad_batches=micro,
        enable_checkpointing=False,
        default_root_dir=tmp_path,
        plugins=[Scaled("16-mixed", "cpu", scaler=scaler)] if scaled else None,
        **quiet,
    )
    trainer.fit(lit, DataLoader(TensorDataset(X, TARGET), batch_size=ITEMS))
    assert_as_by_hand(lit.inner, micro, 1e-7)


class Rows(Dataset):
    """The items by the names of the model's arguments."""

    def __len__(self):
        return len(X)

    def __getitem__(self, i):
        return {"x": X[i], "labels": TARGET[i]}


@MICRO
@pytest.mark.filterwarnings("ignore")
def test_transformers(micro, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, *_):
            return SequentialSampler(self.train_dataset)

    module = Module(micro)
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        num_train_epochs=1,
        per_device_train_batch_size=ITEMS,
        gradient_accumulation_steps=micro,
        max_grad_norm=0.0,
        lr_scheduler_type="constant",
        use_cpu=True,
        save_strategy="no",
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    optimizer = torch.optim.SGD(module.model.parameters(), lr=RATE)
    trainer = InOrder(module, arguments, train_dataset=Rows(), optimizers=(optimizer, None))
    trainer.train()
    assert_as_by_hand(module, micro, 1e-7)
