"""Lightning's own Trainer on a random GPT-2, against a loop by hand."""

import copy
import os
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeSchedule
from steadygrad.optim import LANS, ScaledAdam
from steadygrad.scale import LayerwiseGradScaler
from tests.distributed.ranks import on_ranks
from tests.integrations.by_hand import (
    IGNORED,
    assert_trained_alike,
    token_batches,
    train_by_hand,
)
from tests.integrations.pages import after, blocks, run

lightning = pytest.importorskip("lightning.pytorch", reason="group integrations")
transformers = pytest.importorskip("transformers", reason="group integrations")

from steadygrad.integrations.lightning import (  # noqa: E402
    BatchSizeCallback,
    LayerwisePrecision,
    NoiseScaleCallback,
)

ROWS, ACCUMULATION, STEPS, RANKS = 2, 4, 6, 2
PAGE = "lightning.md"
# Lightning's remarks on how this test trains.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.filterwarnings("ignore:.*litlogger"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


class Module(lightning.LightningModule):
    """A random GPT-2; each micro-batch's loss is a mean over its own labels."""

    def __init__(self, make_optimizer=None):
        super().__init__()
        torch.manual_seed(0)
        config = transformers.GPT2Config(
            vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
            bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        self.model = transformers.GPT2LMHeadModel(config)
        self.make_optimizer = make_optimizer or partial(torch.optim.AdamW, lr=1e-2, weight_decay=0)
        self.windows, self.open, self.logged = [], 0, []

    def training_step(self, batch, batch_idx):
        logits = self.model(input_ids=batch["input_ids"]).logits[:, :-1]
        targets = batch["labels"][:, 1:].flatten()
        self.open += 1
        return torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), targets, ignore_index=IGNORED
        )

    def on_before_optimizer_step(self, optimizer):
        self.windows, self.open = [*self.windows, self.open], 0

    def on_train_batch_end(self, *_):
        self.logged.append(dict(self.trainer.callback_metrics))

    def configure_optimizers(self):
        return self.make_optimizer(self.model.named_parameters())


def loader(batches, ranks=1, rank=0):
    rows = [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(ROWS)]
    # Lightning's own would shuffle.
    sampler = DistributedSampler(rows, ranks, rank, shuffle=False)
    return DataLoader(rows, batch_size=ROWS, sampler=sampler)


def make_trainer(folder, *callbacks, **options):
    given = {
        "accumulate_grad_batches": ACCUMULATION, "max_epochs": 1, "precision": "bf16-mixed",
        "accelerator": "cpu", "devices": 1, "gradient_clip_val": 1.0, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "log_every_n_steps": 1, "default_root_dir": folder, **options,
    }  # fmt: skip
    if "plugins" in given:
        del given["precision"]
    return lightning.Trainer(callbacks=[*callbacks], **given)


def chunks(batches, size=ACCUMULATION):
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def by_hand(module, windows, **options):
    model = copy.deepcopy(module.model)
    noise = train_by_hand(
        model, windows, module.make_optimizer(model.named_parameters()), by_tokens=False, **options
    )
    return noise, model


def test_noise_scale_before_clipping_is_that_of_a_loop_by_hand(tmp_path):
    batches, module = token_batches(ACCUMULATION * STEPS), Module()
    expected, model = by_hand(module, chunks(batches))
    callback = NoiseScaleCallback()
    make_trainer(tmp_path, callback).fit(module, loader(batches))
    estimate = callback.noise.estimate()
    assert int(estimate.measurements) == STEPS
    assert int(callback.noise.altered) == 0
    assert float(estimate.value) == pytest.approx(expected.value, rel=1e-3)
    logged = module.logged[-1]["steadygrad/noise_scale/noise_trace"]
    assert float(logged) == pytest.approx(float(estimate.noise_trace))
    assert_trained_alike(module.model, model, Module().model)


@pytest.mark.parametrize("kind", [LANS, ScaledAdam])
def test_an_optimizer_is_that_of_a_loop_by_hand(kind, tmp_path):
    batches, module = token_batches(ACCUMULATION * STEPS), Module(partial(kind, lr=1e-2))
    _, model = by_hand(module, chunks(batches))
    make_trainer(tmp_path).fit(module, loader(batches))
    assert_trained_alike(module.model, model, Module().model)


def test_a_short_last_window_is_measured_though_lightning_divides_it_too_far(tmp_path):
    batches, module = token_batches(ACCUMULATION + 3), Module()
    callback = NoiseScaleCallback()
    expected, _ = by_hand(module, chunks(batches))
    make_trainer(tmp_path, callback).fit(module, loader(batches))
    assert module.windows == [4, 3]
    # Of a mean over three, though .grad holds three quarters of it, which rounds elsewhere.
    signals = callback.noise.state_dict()["ring"][:2, 0].sum(1).tolist()
    assert signals == pytest.approx(expected.signals, rel=1e-2)


GROWS = BatchSizeSchedule(
    [
        {"from_samples": 0, "batch_size": 4},
        {"from_samples": 10, "batch_size": 6},
        {"from_samples": 30, "batch_size": 12},
    ]
)


def test_a_schedule_of_batch_sizes_cuts_no_window(tmp_path):
    module = Module()
    callbacks = BatchSizeCallback(GROWS, ROWS), NoiseScaleCallback()
    trainer = make_trainer(tmp_path, *callbacks, accumulate_grad_batches=1, max_epochs=2)
    trainer.fit(module, loader(token_batches(17)))
    assert module.windows == [2, 2, 2, 3, 3, 3, 2, 6, 6, 5]
    assert float(module.logged[-1]["steadygrad/batch_size"]) == 12
    assert int(callbacks[1].noise.estimate().measurements) == 10


def resumed(tmp_path, make_callbacks, **options):
    """The same two epochs at once, and with a checkpoint between them."""
    batches = token_batches(17)
    modules = []
    for epochs, path in ((2, None), (1, None), (2, str(tmp_path / "saved.ckpt"))):
        module, callbacks = Module(partial(LANS, lr=1e-2)), make_callbacks()
        trainer = make_trainer(tmp_path, *callbacks, max_epochs=epochs, **options)
        trainer.fit(module, loader(batches), ckpt_path=path)
        if epochs == 1:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        modules.append((module, callbacks))
    return modules[0], modules[2]


def test_resumes_to_the_bit(tmp_path):
    def callbacks():
        return BatchSizeCallback(GROWS, ROWS), NoiseScaleCallback()

    (whole, kept), (again, loaded) = resumed(tmp_path, callbacks, accumulate_grad_batches=1)
    assert whole.windows[-3:] == again.windows == [6, 6, 5]
    for found, wanted in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted)
    found, wanted = (each[1].noise.state_dict()["ring"] for each in (loaded, kept))
    assert torch.equal(found, wanted)


def layerwise(**options):
    scales = {"model.transformer.h.*": 2.0**6}
    make = partial(LayerwiseGradScaler, layer_scales=scales, init_scale=2.0**8, growth_interval=2)
    return LayerwisePrecision(partial(make, **options))


def test_float16_by_layers_is_that_of_a_loop_by_hand(tmp_path):
    batches, module = token_batches(ACCUMULATION * STEPS), Module()
    expected, _ = by_hand(module, chunks(batches), dtype=torch.float16)
    plugin, callback = layerwise(), NoiseScaleCallback()
    make_trainer(tmp_path, callback, plugins=[plugin]).fit(module, loader(batches))
    assert plugin.scaler.get_scales()["model.transformer.h.0"] == 2.0 ** (6 + STEPS // 2)
    assert int(callback.noise.skipped) == int(callback.noise.altered) == 0
    assert float(callback.noise.estimate().value) == pytest.approx(expected.value, rel=1e-3)


def test_layer_scales_resume_to_the_bit(tmp_path):
    batches, modules = token_batches(17), []
    for epochs, path in ((2, None), (1, None), (2, str(tmp_path / "saved.ckpt"))):
        module, plugin = Module(), layerwise()
        trainer = make_trainer(tmp_path, plugins=[plugin], max_epochs=epochs)
        trainer.fit(module, loader(batches), ckpt_path=path)
        if epochs == 1:
            trainer.save_checkpoint(tmp_path / "saved.ckpt")
        modules.append((module, plugin))
    (whole, kept), _, (again, loaded) = modules
    assert loaded.scaler.state_dict() == kept.scaler.state_dict()
    for found, wanted in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_torchs_scaler_is_asked_for_nothing_after_it_unscaled(tmp_path):
    batches, module = token_batches(ACCUMULATION * STEPS), Module()
    expected, _ = by_hand(module, chunks(batches), dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    callback = NoiseScaleCallback()
    make_trainer(tmp_path, callback, plugins=[plugin]).fit(module, loader(batches))
    assert int(callback.noise.skipped) == int(callback.noise.altered) == 0
    assert float(callback.noise.estimate().value) == pytest.approx(expected.value, rel=1e-3)


def test_a_fused_optimizer_leaves_torchs_scale_in_the_gradients(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    module = Module(lambda named: torch.optim.AdamW([p for _, p in named], lr=1e-2, fused=True))
    expected, _ = by_hand(module, chunks(batches), dtype=torch.float16, clip=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plugin = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler=scaler)
    callback = NoiseScaleCallback()
    trainer = make_trainer(tmp_path, callback, plugins=[plugin], gradient_clip_val=None)
    trainer.fit(module, loader(batches))
    assert scaler.get_scale() == 2.0 ** (10 + STEPS // 2)
    assert int(callback.noise.skipped) == int(callback.noise.altered) == 0
    assert float(callback.noise.estimate().value) == pytest.approx(expected.value, rel=1e-3)


def train_on_rank(rank, world, folder):
    os.environ["LOCAL_RANK"] = str(rank)
    batches, module = token_batches(RANKS * ACCUMULATION * STEPS), Module()
    callback = NoiseScaleCallback()
    trainer = make_trainer(folder, callback, devices=world, strategy="ddp")
    trainer.fit(module, loader(batches, world, rank))
    return {
        "value": float(callback.noise.estimate().value),
        "kind": callback.noise.world.kind,
        "altered": int(callback.noise.altered),
    }


def on_each(batches, ranks):
    """The micro-batches of all ranks, as a DistributedSampler deals out rows."""
    whole = {k: torch.cat([batch[k] for batch in batches]) for k in batches[0]}
    dealt = []
    for start in range(0, len(whole["labels"]), ROWS * ranks):
        for rank in range(ranks):
            dealt.append(
                {k: v[start + rank : start + ROWS * ranks : ranks] for k, v in whole.items()}
            )
    return dealt


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path))
    dealt = on_each(token_batches(RANKS * ACCUMULATION * STEPS), RANKS)
    expected, _ = by_hand(Module(), chunks(dealt, RANKS * ACCUMULATION))
    assert [row["kind"] for row in found] == ["ddp"] * RANKS
    assert [row["altered"] for row in found] == [0] * RANKS
    assert found[0]["value"] == found[1]["value"] == pytest.approx(expected.value, rel=1e-3)


def test_refusals(tmp_path):
    module, data = Module(), loader(token_batches(4))
    with pytest.raises(InputError, match=r"two micro-batches a step .*Found 1\. Remedy"):
        make_trainer(tmp_path, NoiseScaleCallback(), accumulate_grad_batches=1).fit(module, data)
    with pytest.raises(InputError, match=r"multiple of 5, .*Found 4\. Remedy"):
        BatchSizeCallback(GROWS, 5)
    module.automatic_optimization = False
    with pytest.raises(InputError, match=r"Found manual optimization\. Remedy"):
        make_trainer(
            tmp_path, NoiseScaleCallback(), accumulate_grad_batches=1, gradient_clip_val=None
        ).fit(module, data)


def names_of(tmp_path):
    """Names that the page's code takes for granted."""
    given = {
        "accelerator": "cpu", "logger": False, "enable_checkpointing": False, "max_epochs": 1,
        "enable_progress_bar": False, "enable_model_summary": False, "default_root_dir": tmp_path,
    }  # fmt: skip
    return {
        "Trainer": partial(lightning.Trainer, **given),
        "BatchSizeSchedule": BatchSizeSchedule,
        "LayerwiseGradScaler": LayerwiseGradScaler,
        "model": Module(),
        "data": loader(token_batches(ACCUMULATION * STEPS)),
    }


def test_the_pages_diff_measures(tmp_path):
    found = run(after(blocks(PAGE, "diff")[0]), names_of(tmp_path), PAGE)
    noise = found["trainer"].callbacks[0].noise
    assert int(noise.estimate().measurements) == STEPS


def test_the_pages_other_tools_train(tmp_path):
    found = run(blocks(PAGE, "python")[0], names_of(tmp_path), PAGE)
    assert found["model"].windows[0] == 2
    found = run(blocks(PAGE, "python")[1], names_of(tmp_path), PAGE)
    assert found["trainer"].precision_plugin.scaler.get_scales()["model.transformer.h.0"] == 16
