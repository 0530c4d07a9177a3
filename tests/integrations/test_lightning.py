"""Lightning's own Trainer on a random GPT-2, against a loop by hand."""

import copy
import math
import os
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeSchedule
from steadygrad.optim import LANS
from steadygrad.scale import LayerwiseGradScaler
from tests.contracts.problems import assert_same, hooks_of
from tests.distributed.ranks import on_ranks
from tests.integrations import by_hand
from tests.integrations.by_hand import ACCUMULATION, GROWS, RANKS, ROWS, STEPS, token_batches
from tests.integrations.pages import after, blocks, run

lightning = pytest.importorskip("lightning.pytorch", reason="group integrations")
pytest.importorskip("transformers", reason="group integrations")

from steadygrad.integrations.lightning import (  # noqa: E402
    BatchSizeCallback,
    GradientWatchCallback,
    LayerwisePrecision,
    NoiseScaleCallback,
)

PAGE = "lightning.md"
ADAMW = partial(torch.optim.AdamW, lr=1e-2, weight_decay=0)
CULPRIT = "model.transformer.h.0.mlp.act"
# Lightning's remarks on how this test trains.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*num_workers", "ignore:.*litlogger", "ignore:.*isinstance.treespec, LeafSpec"
)


class Module(lightning.LightningModule):
    """A random GPT-2; each micro-batch's loss is a mean over its own labels."""

    def __init__(self, make_optimizer=ADAMW):
        super().__init__()
        self.model, self.make_optimizer = by_hand.gpt2(), make_optimizer
        self.windows, self.open, self.logged = [], 0, []

    def training_step(self, batch, batch_idx):
        self.open += 1
        logits = self.model(input_ids=batch["input_ids"]).logits
        return by_hand.next_tokens(logits, batch["labels"])

    def on_before_optimizer_step(self, optimizer):
        self.windows, self.open = [*self.windows, self.open], 0

    def on_train_batch_end(self, *_):
        self.logged.append(dict(self.trainer.callback_metrics))

    def configure_optimizers(self):
        return self.make_optimizer(self.model.named_parameters())


def loader(batches, ranks=1, rank=0):
    rows = by_hand.rows_from(batches)
    # Lightning's own would shuffle.
    sampler = DistributedSampler(rows, ranks, rank, shuffle=False)
    return DataLoader(rows, batch_size=ROWS, sampler=sampler)


QUIET = {
    "accelerator": "cpu", "max_epochs": 1, "logger": False, "enable_checkpointing": False,
    "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


def make_trainer(folder, *callbacks, **options):
    given = {
        **QUIET, "accumulate_grad_batches": ACCUMULATION, "precision": "bf16-mixed", "devices": 1,
        "gradient_clip_val": 1.0, "log_every_n_steps": 1, "default_root_dir": folder, **options,
    }  # fmt: skip
    if "plugins" in given:
        del given["precision"]
    return lightning.Trainer(callbacks=[*callbacks], **given)


def train_by_hand(module, windows, **options):
    model = copy.deepcopy(module.model)
    optimizer = module.make_optimizer(model.named_parameters())
    return model, by_hand.train_by_hand(model, windows, optimizer, by_tokens=False, **options)


def test_noise_scale_before_clipping_is_that_of_a_loop_by_hand(tmp_path):
    batches, module = token_batches(ACCUMULATION * STEPS), Module(partial(LANS, lr=1e-2))
    model, expected = train_by_hand(module, by_hand.chunks(batches))
    callback = NoiseScaleCallback()
    make_trainer(tmp_path, callback).fit(module, loader(batches))
    by_hand.assert_measured(callback.noise, expected)
    logged = module.logged[-1]["steadygrad/noise_scale/noise_trace"]
    assert float(logged) == pytest.approx(float(callback.noise.estimate().noise_trace))
    by_hand.assert_trained_alike(module.model, model, by_hand.gpt2())


def test_a_short_last_window_is_measured_though_lightning_divides_it_too_far(tmp_path):
    batches, module = token_batches(ACCUMULATION + 3), Module()
    callback = NoiseScaleCallback()
    _, expected = train_by_hand(module, by_hand.chunks(batches))
    make_trainer(tmp_path, callback).fit(module, loader(batches))
    assert module.windows == [4, 3]
    # Of a mean over three, though .grad holds three quarters of it, which rounds elsewhere.
    signals = callback.noise.state_dict()["ring"][:2, 0].sum(1).tolist()
    assert signals == pytest.approx(expected.signals, rel=1e-2)


class Choosy(Module):
    """Has no loss for some micro-batches."""

    def training_step(self, batch, batch_idx):
        return None if batch_idx in (5, 6, 7) else super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
def test_windows_with_one_loss_are_left_out(tmp_path):
    """A window whose other micro-batches have none, and the last one of an epoch."""
    batches, callback, module = token_batches(3 * ACCUMULATION + 1), NoiseScaleCallback(), Choosy()
    make_trainer(tmp_path, callback).fit(module, loader(batches))
    assert module.windows == [4, 1, 4, 1]
    assert int(callback.noise.estimate().measurements) == 2
    assert int(callback.noise.altered) == int(callback.noise.skipped) == 0


def layerwise(interval=2):
    scales = {"model.transformer.h.*": 2.0**6}
    options = {"layer_scales": scales, "init_scale": 2.0**8, "growth_interval": interval}
    return LayerwisePrecision(partial(LayerwiseGradScaler, **options))


def test_resumes_to_the_bit_between_windows_that_grow(tmp_path):
    """The same two epochs at once, and with a checkpoint between them."""
    batches, path, runs = token_batches(17), tmp_path / "saved.ckpt", []
    for epochs, resumed in ((2, None), (1, None), (2, path)):
        module, noise, plugin = Module(), NoiseScaleCallback(), layerwise(interval=4)
        trainer = make_trainer(
            tmp_path, BatchSizeCallback(GROWS, ROWS), noise, plugins=[plugin], max_epochs=epochs,
            accumulate_grad_batches=1,
        )  # fmt: skip
        trainer.fit(module, loader(batches), ckpt_path=resumed)
        if epochs == 1:
            trainer.save_checkpoint(path)
        runs.append((module, noise, plugin))
    (whole, kept, plugin), _, (again, loaded, other) = runs
    assert whole.windows == [2, 2, 2, 3, 3, 3, 2, 6, 6, 5]
    assert again.windows == [6, 6, 5]
    assert float(whole.logged[-1]["steadygrad/batch_size"]) == 12
    assert int(kept.noise.estimate().measurements) == 10
    assert_same(again.parameters(), whole.parameters())
    assert torch.equal(loaded.noise.state_dict()["ring"], kept.noise.state_dict()["ring"])
    assert other.scaler.state_dict() == plugin.scaler.state_dict()
    # A checkpoint before the first step keeps what was loaded.
    waiting = NoiseScaleCallback()
    assert waiting.state_dict() == {}
    waiting.load_state_dict(kept.state_dict())
    assert torch.equal(waiting.state_dict()["noise"]["ring"], kept.noise.state_dict()["ring"])


def test_each_fit_is_measured_anew_unless_it_resumes(tmp_path):
    batches, callback, module = token_batches(2 * ACCUMULATION), NoiseScaleCallback(), Module()
    for each, path in ((module, None), (Module(), None), (module, "saved.ckpt")):
        trainer = make_trainer(tmp_path, callback, max_epochs=2 if path else 1)
        trainer.fit(each, loader(batches), ckpt_path=path and str(tmp_path / path))
        assert int(callback.noise.estimate().measurements) == (4 if path else 2)
        trainer.save_checkpoint(tmp_path / "saved.ckpt")


@pytest.mark.parametrize("kind", ["by layers", "torch's", "torch's, left in the gradients"])
def test_noise_scale_in_float16_is_that_of_a_loop_by_hand(kind, tmp_path):
    batches, module, options = token_batches(ACCUMULATION * STEPS), Module(), {}
    if kind == "torch's, left in the gradients":
        options = {"gradient_clip_val": None}
        module.make_optimizer = partial(ADAMW, fused=True)
    _, expected = train_by_hand(
        module, by_hand.chunks(batches), dtype=torch.float16, clip=None if options else 1.0
    )
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    if kind == "by layers":
        plugin = layerwise()
    callback = NoiseScaleCallback()
    make_trainer(tmp_path, callback, plugins=[plugin], **options).fit(module, loader(batches))
    by_hand.assert_measured(callback.noise, expected)
    if kind == "by layers":
        assert plugin.scaler.get_scales()["model.transformer.h.0"] == 2.0 ** (6 + STEPS // 2)
    else:
        assert scaler.get_scale() == 2.0 ** (10 + STEPS // 2)


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


def train_on_rank(rank, world, folder):
    os.environ["LOCAL_RANK"] = str(rank)
    callback, watch = NoiseScaleCallback(), GradientWatchCallback()
    options = {"accumulate_grad_batches": 2, "devices": world, "strategy": "ddp"}
    # In bfloat16 AdamW's first steps go as gradients round, elsewhere on each processor.
    options["precision"] = "32-true"
    trainer = make_trainer(folder, callback, watch, **options)
    trainer.fit(Module(), loader(token_batches(RANKS * ACCUMULATION * STEPS), world, rank))
    assert watch.findings == []
    return by_hand.found_on_rank(callback.noise)


def on_each(batches, ranks):
    """The micro-batches of all ranks, as a DistributedSampler deals out rows."""
    whole = {k: torch.cat([batch[k] for batch in batches]) for k in batches[0]}
    starts = range(0, len(whole["labels"]), ROWS * ranks)
    places = [
        slice(start + r, start + ROWS * ranks, ranks) for start in starts for r in range(ranks)
    ]
    return [{k: v[place] for k, v in whole.items()} for place in places]


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path))
    dealt = on_each(token_batches(RANKS * ACCUMULATION * STEPS), RANKS)
    _, expected = train_by_hand(Module(), by_hand.chunks(dealt, RANKS * 2), dtype=None)
    by_hand.assert_measured_on_ranks(found, "ddp", expected)


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


def test_refusals(tmp_path):
    module, data = Module(), loader(token_batches(4))
    options = {"accumulate_grad_batches": 1, "gradient_clip_val": None}
    with pytest.raises(InputError, match=r"two micro-batches a step .*Found 1\. Remedy"):
        make_trainer(tmp_path, NoiseScaleCallback(), **options).fit(module, data)
    with pytest.raises(InputError, match=r"multiple of 5, .*Found 4\. Remedy"):
        BatchSizeCallback(GROWS, 5)
    module.automatic_optimization = False
    with pytest.raises(InputError, match=r"Found manual optimization\. Remedy"):
        make_trainer(tmp_path, NoiseScaleCallback(), **options).fit(module, data)


class Breaks(Module):
    """A module within its first block is at fault in some micro-batches."""

    broken = (6, 10, 18)

    def __init__(self):
        super().__init__()
        self.model.transformer.h[0].mlp.act = by_hand.BadBackward()

    def training_step(self, batch, batch_idx):
        self.model.transformer.h[0].mlp.act.broken = batch_idx in self.broken
        return super().training_step(batch, batch_idx)

    def configure_gradient_clipping(self, optimizer, **_):
        """The weights stay finite."""
        for p in self.parameters():
            p.grad.nan_to_num_(0.0)


# By windows of four, batches 6 and 10 are in a row of two steps.
@pytest.mark.parametrize(("accumulation", "named"), [(1, [6, 10, 18]), (ACCUMULATION, [6, 18])])
def test_a_planted_fault_is_named_once_for_each_row_of_steps(accumulation, named, tmp_path):
    callback, module = GradientWatchCallback(), Breaks()
    trainer = make_trainer(tmp_path, callback, accumulate_grad_batches=accumulation)
    with pytest.warns(UserWarning, match=r"Batch .*, rank 0: the backward pass of") as warned:
        trainer.fit(module, loader(token_batches(5 * ACCUMULATION)))
    told = [str(each.message) for each in warned if each.category is UserWarning]
    assert told == [str(found) for found in callback.findings]
    found = [(each.batch, each.kind, each.name) for each in callback.findings]
    assert found == [(batch, "gradient", CULPRIT) for batch in named]
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


def test_the_pages_code_trains(tmp_path):
    diff, (grows, layers, watched) = after(blocks(PAGE, "diff")[0]), blocks(PAGE, "python")

    def trained(code, module):
        names = {
            "Trainer": partial(lightning.Trainer, **QUIET, default_root_dir=tmp_path),
            "BatchSizeSchedule": BatchSizeSchedule,
            "LayerwiseGradScaler": LayerwiseGradScaler,
            "model": module,
            "data": loader(token_batches(ACCUMULATION * STEPS)),
        }
        return run(code, names, PAGE)["trainer"]

    assert int(trained(diff, Module()).callbacks[0].noise.estimate().measurements) == STEPS
    trained(grows, module := Module())
    assert module.windows[0] == 2
    scaler = trained(layers, Module()).precision_plugin.scaler
    assert scaler.get_scales()["model.transformer.h.0"] == 2**4
    with pytest.warns(UserWarning, match=f"the backward pass of '{CULPRIT}'"):
        trainer = trained(watched, Breaks())
    assert [found.batch for found in trainer.callbacks[0].findings] == [6, 18]
