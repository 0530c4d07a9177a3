"""Windows, states and hooks in Lightning's own Trainer: what is left out, kept and taken away."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from steadygrad._checks import InputError
from tests.integrations.by_hand import token_batches
from tests.integrations.test_lightning import (
    ACCUMULATION,
    GROWS,
    ROWS,
    Module,
    layerwise,
    lightning,
    loader,
    make_trainer,
)

from steadygrad.integrations.lightning import (  # isort: skip
    BatchSizeCallback,
    GradientWatchCallback,
    NoiseScaleCallback,
)

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers", "ignore:.*isinstance.treespec")


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, batches):
        self.rows = [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(ROWS)]

    def __iter__(self):
        return iter(self.rows)


def stream(batches):
    return DataLoader(Stream(batches), batch_size=ROWS)


@pytest.mark.parametrize("load", [loader, stream])
def test_a_last_window_of_one_micro_batch_is_left_out(load, tmp_path):
    batches, callback, module = token_batches(ACCUMULATION + 1), NoiseScaleCallback(), Module()
    make_trainer(tmp_path, callback, max_epochs=2).fit(module, load(batches))
    assert module.windows == [4, 1, 4, 1]
    assert int(callback.noise.estimate().measurements) == 2
    assert int(callback.noise.altered) == int(callback.noise.skipped) == 0
    # Those of the first window, to the bit: the part that was left out is in none.
    once = NoiseScaleCallback()
    make_trainer(tmp_path, once).fit(Module(), load(batches[:ACCUMULATION]))
    rings = [each.noise.state_dict()["ring"][:1] for each in (callback, once)]
    assert torch.equal(*rings)


class Choosy(Module):
    """Has no loss for some micro-batches."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (5, 6, 7) else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_a_window_with_one_loss_is_left_out(tmp_path):
    callback, module = NoiseScaleCallback(), Choosy()
    make_trainer(tmp_path, callback).fit(module, loader(token_batches(3 * ACCUMULATION)))
    assert module.windows == [4, 1, 4]
    assert int(callback.noise.estimate().measurements) == 2


def test_a_state_that_was_loaded_is_saved_again_before_training(tmp_path):
    callback, again = NoiseScaleCallback(), NoiseScaleCallback()
    assert again.state_dict() == {}
    make_trainer(tmp_path, callback).fit(Module(), loader(token_batches(2 * ACCUMULATION + 1)))
    again.load_state_dict(callback.state_dict())
    found, wanted = again.state_dict(), callback.state_dict()
    assert torch.equal(found["noise"]["ring"], wanted["noise"]["ring"])


def hooks_of(module):
    """Hooks on its weights, and on it and the modules within."""
    weights = sum(len(p._backward_hooks or ()) for p in module.parameters())
    return weights + sum(len(m._forward_hooks | m._forward_pre_hooks) for m in module.modules())


class Ends(Module):
    """Ends in an error while hooks are on it."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            assert hooks_of(self) > len([*self.parameters()])
            raise ZeroDivisionError
        return super().training_step(batch, batch_idx)


def test_hooks_leave_the_model_with_training(tmp_path):
    callbacks = NoiseScaleCallback(), GradientWatchCallback()
    module, ending, data = Module(), Ends(), loader(token_batches(2 * ACCUMULATION))
    make_trainer(tmp_path, *callbacks).fit(module, data)
    assert hooks_of(module) == 0
    with pytest.raises(ZeroDivisionError):
        make_trainer(tmp_path, NoiseScaleCallback(), GradientWatchCallback()).fit(ending, data)
    assert hooks_of(ending) == 0


def test_another_model_has_a_scaler_of_its_own(tmp_path):
    plugin, data = layerwise(), loader(token_batches(ACCUMULATION))
    scalers, modules = [], (Module(), Module())
    for module in (*modules, modules[1]):
        make_trainer(tmp_path, plugins=[plugin]).fit(module, data)
        scalers.append(plugin.scaler)
    assert scalers[0] is not scalers[1]
    assert scalers[1] is scalers[2]
    assert hooks_of(modules[0]) == 0
    assert hooks_of(modules[1]) > 0
    assert plugin.scaler.get_scales()["model.transformer.h.0"] == 2.0 ** (6 + 1)


def test_other_strategies_are_refused():
    module = Module()
    for kind in (lightning.strategies.FSDPStrategy, lightning.strategies.DeepSpeedStrategy):
        # Neither can be made without a GPU and packages of its own.
        trainer = SimpleNamespace(strategy=object.__new__(kind))
        for begin in (
            NoiseScaleCallback().on_train_start,
            GradientWatchCallback().on_train_start,
            partial(BatchSizeCallback(GROWS, 2).setup, stage="fit"),
        ):
            with pytest.raises(InputError, match=rf"Found {kind.__name__}\. Remedy: 'ddp'"):
                begin(trainer, module)


def test_an_interval_without_an_end_is_logged_as_such(tmp_path):
    """Lightning repeats the last number of a key that is missing."""
    module = Module()
    trainer = make_trainer(tmp_path, NoiseScaleCallback(), max_epochs=2)
    trainer.fit(module, loader(token_batches(2 * ACCUMULATION)))
    rows = [row for row in module.logged if "steadygrad/noise_scale/high" in row]
    assert len(rows) > 4
    highs = [float(row["steadygrad/noise_scale/high"]) for row in rows]
    resolved = [float(row["steadygrad/noise_scale/resolved"]) for row in rows]
    assert any(math.isinf(high) for high in highs)
    assert all(math.isfinite(high) or not r for high, r in zip(highs, resolved, strict=True))


def test_each_fit_is_measured_anew_unless_it_resumes(tmp_path):
    batches, callback, module = token_batches(2 * ACCUMULATION), NoiseScaleCallback(), Module()
    for each, path in ((module, None), (module, None), (Module(), None), (module, "saved.ckpt")):
        trainer = make_trainer(tmp_path, callback, max_epochs=2 if path else 1)
        trainer.fit(each, loader(batches), ckpt_path=path and str(tmp_path / path))
        assert int(callback.noise.estimate().measurements) == (4 if path else 2)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")
