"""In Lightning's Trainer: its MixedPrecision takes the scaler as it takes torch's."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from steadygrad.scale import LayerwiseGradScaler
from tests.unit.scale.training import SCALES, Poison, assert_equal, batch, make, weights_of

STEPS = 6
DATA = [batch(step) for step in range(STEPS)]


class Lightning:
    """A model in a Trainer with a scaler, in float16 by autocast."""

    def __init__(self, folder):
        self.lightning = pytest.importorskip("lightning")
        plugins = pytest.importorskip("lightning.pytorch.plugins")
        self.model, optimizer = make(optimizer=torch.optim.Adam)
        self.scaler = LayerwiseGradScaler(self.model, SCALES, growth_interval=3)
        inner = self.model

        class Lit(self.lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.inner = inner

            def training_step(self, batch, index):
                x, y = batch
                return (self.inner(x).float() - y).square().mean()

            def configure_optimizers(self):
                return optimizer

        self.lit = Lit()
        self.make_trainer = lambda steps: self.lightning.Trainer(
            max_steps=steps,
            accelerator="cpu",
            gradient_clip_val=10.0,
            enable_checkpointing=False,
            default_root_dir=folder,
            plugins=[plugins.MixedPrecision("16-mixed", "cpu", scaler=self.scaler)],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )

    def fit(self, steps, checkpoint=None):
        x, y = (torch.cat(both) for both in zip(*DATA, strict=True))
        trainer = self.make_trainer(steps)
        loader = DataLoader(TensorDataset(x, y), batch_size=len(x) // STEPS)
        trainer.fit(self.lit, loader, ckpt_path=checkpoint)
        return trainer


def by_hand(poisoned=None):
    model, optimizer = make(optimizer=torch.optim.Adam)
    scaler = LayerwiseGradScaler(model, SCALES, growth_interval=3)
    poison = Poison(model.b[0])
    for step, (x, y) in enumerate(DATA):
        poison.active = step == poisoned
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = (model(x).float() - y).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler


@pytest.mark.filterwarnings("ignore")
def test_trains_as_a_loop_by_hand(tmp_path):
    ours = Lightning(tmp_path)
    ours.fit(STEPS)
    model, scaler = by_hand()
    assert_equal(weights_of(ours.model), weights_of(model))
    assert ours.scaler.state_dict() == scaler.state_dict()
    assert ours.scaler.get_scales()["b"] == SCALES["b"] * 4


@pytest.mark.filterwarnings("ignore")
def test_an_overflow_skips_the_step_and_names_the_layer(tmp_path):
    ours = Lightning(tmp_path)
    poison, seen = Poison(ours.model.b[0]), []
    poison.active = False
    update = ours.scaler.update

    def look():
        update()
        seen.append(ours.scaler.culprits())
        poison.active = len(seen) == 2

    ours.scaler.update = look
    ours.fit(STEPS)
    model, _ = by_hand(poisoned=2)
    assert seen == [[], [], ["b"], [], [], []]
    assert_equal(weights_of(ours.model), weights_of(model))
    assert ours.scaler.skipped == 1


def fresh_state():
    return LayerwiseGradScaler(make()[0], SCALES, growth_interval=3).state_dict()


@pytest.mark.filterwarnings("ignore")
def test_its_checkpoint_holds_the_scales(tmp_path):
    whole = Lightning(tmp_path)
    whole.fit(2 * STEPS)
    first = Lightning(tmp_path)
    first.fit(STEPS).save_checkpoint(tmp_path / "half.ckpt")
    assert first.scaler.state_dict() not in (whole.scaler.state_dict(), fresh_state())
    second = Lightning(tmp_path)
    second.fit(2 * STEPS, tmp_path / "half.ckpt")
    # Not the weights: the Trainer goes on with other batches, with torch's scaler too.
    assert second.scaler.state_dict() == whole.scaler.state_dict()
