"""Hugging Face's own Trainer on a random GPT-2, against a loop by hand."""

import copy
import json

import pytest
import torch

from steadygrad.noise import BatchSizeSchedule
from steadygrad.optim import LAMB, LANS, ScaledAdam
from tests.integrations.by_hand import assert_trained_alike, token_batches, train_by_hand

transformers = pytest.importorskip("transformers", reason="group integrations")

from steadygrad.integrations.transformers import SteadygradMixin  # noqa: E402

ROWS, ACCUMULATION, STEPS = 2, 4, 6


def make_model(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **options,
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    # Else transformers 5.23 divides by labels that its loss does not have; see its own test below.
    model.loss_type = "ForCausalLM"
    return model


class Trainer(SteadygradMixin, transformers.Trainer):
    """As on the page."""


def rows_from(batches):
    return [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(ROWS)]


def arguments(folder, **options):
    given = {
        "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS, "train_sampling_strategy": "sequential", "bf16": True, "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "constant",
        "learning_rate": 1e-2, "disable_tqdm": True, **options,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **given)


def make_trainer(folder, batches, model=None, options=None, **given):
    model = make_model() if model is None else model
    data = rows_from(batches)
    return Trainer(model, arguments(folder, **(options or {})), train_dataset=data, **given)


def chunks(batches, size=ACCUMULATION):
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def adamw(model, lr=1e-2):
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def test_noise_scale_of_padded_labels_is_that_of_a_loop_by_hand(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    trainer = make_trainer(tmp_path, batches)
    expected = train_by_hand(model := copy.deepcopy(trainer.model), chunks(batches), adamw(model))
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0
    estimate = trainer.noise.estimate()
    assert int(estimate.measurements) == STEPS
    assert int(trainer.noise.altered) == int(trainer.noise.skipped) == 0
    assert float(estimate.value) == pytest.approx(expected.value, rel=1e-3)
    assert float(estimate.noise_trace) == pytest.approx(expected.average(expected.noises), rel=1e-3)


def test_gpt_2_as_it_is_divides_by_more_labels_than_it_has(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    model = make_model()
    model.loss_type = None
    trainer = make_trainer(tmp_path, batches, model)
    model = copy.deepcopy(model)
    expected = train_by_hand(model, chunks(batches), adamw(model), uncounted=1)
    trainer.train()
    assert float(trainer.noise.estimate().value) == pytest.approx(expected.value, rel=1e-3)


def test_without_weights_it_would_be_another(tmp_path):
    """The test above can fail: what `accumulation="mean"` measures is far off."""
    batches = token_batches(ACCUMULATION * STEPS)
    model = make_model()
    right = train_by_hand(model, chunks(batches), adamw(model)).value
    model = make_model()
    wrong = train_by_hand(model, chunks(batches), adamw(model), by_tokens=False).value
    assert abs(wrong / right - 1) > 0.01


def test_numbers_are_in_the_trainers_logs(tmp_path):
    trainer = make_trainer(tmp_path, token_batches(ACCUMULATION * STEPS))
    trainer.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    assert len(rows) == STEPS
    assert rows[-1]["steadygrad/noise_scale/noise_trace"] == pytest.approx(
        float(trainer.noise.estimate().noise_trace)
    )
    assert rows[-1]["steadygrad/noise_scale/altered"] == 0
    json.dumps(rows, allow_nan=False)


@pytest.mark.parametrize("kind", [LANS, LAMB, ScaledAdam])
def test_an_optimizer_is_that_of_a_loop_by_hand(kind, tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    options = {"lr": 1e-2} if kind is ScaledAdam else {"lr": 1e-2, "weight_decay": 0.0}
    given = make_model()
    model = copy.deepcopy(given)
    optimizers = kind(given.named_parameters(), **options), None
    trainer = make_trainer(tmp_path, batches, given, optimizers=optimizers)
    optimizer = kind(model.named_parameters(), **options)
    start = copy.deepcopy(model)
    train_by_hand(model, chunks(batches), optimizer)
    trainer.train()
    assert_trained_alike(trainer.model, model, start)


def history(trainer):
    keys = ("step", "loss", "grad_norm")
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return [
        {k: v for k, v in row.items() if k in keys or k.startswith("steadygrad")} for row in rows
    ]


def test_resumes_to_the_bit(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    options = {"save_strategy": "steps", "save_steps": 3}
    kind = (LANS, {"lr": 1e-2})
    whole = make_trainer(tmp_path, batches, options=options, optimizer_cls_and_kwargs=kind)
    whole.train()
    again = make_trainer(tmp_path, batches, options=options, optimizer_cls_and_kwargs=kind)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert history(again)[-3:] == history(whole)[-3:]
    assert history(whole)[-1]["steadygrad/optimizer/skipped"] == 0
    for found, wanted in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, wanted)
    assert torch.equal(again.noise.state_dict()["ring"], whole.noise.state_dict()["ring"])
    saved = torch.load(tmp_path / "checkpoint-3" / "steadygrad-state.pt", weights_only=True)
    assert saved["noise"]["steps"] == 3


GROWS = BatchSizeSchedule(
    [
        {"from_samples": 0, "batch_size": 4},
        {"from_samples": 10, "batch_size": 6},
        {"from_samples": 30, "batch_size": 12},
    ]
)


class Windows(Trainer):
    """Notes the micro-batches of each step."""

    sizes = ()

    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.open = (*getattr(self, "open", ()), inputs["input_ids"][0, 0].item())
        if self.accelerator.sync_gradients:
            self.sizes, self.open = (*self.sizes, len(self.open)), ()
        return loss


# 10 samples are 5 micro-batches; the first multiple of 3 that ends a window of 2 is 6. After 30
# samples come 15, and the first multiple of 6 that ends a window of 3 is 18, or the next epoch.
@pytest.mark.parametrize(
    ("batches", "expected"),
    [(60, [2, 2, 2, 3, 3, 3, 3, 6, 6]), (17, [2, 2, 2, 3, 3, 3, 2, 6])],
    ids=["one epoch", "epochs"],
)
def test_a_schedule_of_batch_sizes_cuts_no_window(batches, expected, tmp_path):
    data = token_batches(batches)
    args = arguments(tmp_path, max_steps=len(expected))
    trainer = Windows(make_model(), args, train_dataset=rows_from(data), batch_sizes=GROWS)
    trainer.train()
    assert list(trainer.sizes) == expected
    assert trainer.state.global_step == len(expected)
    sizes = [row["steadygrad/batch_size"] for row in trainer.state.log_history if "loss" in row]
    assert sizes == [4, 4, 4, 6, 6, 6, 6, 12, 12][: len(sizes)]


def test_a_schedule_counts_the_steps_of_epochs(tmp_path):
    data = token_batches(17)
    args = arguments(tmp_path, max_steps=-1, num_train_epochs=2)
    trainer = Windows(make_model(), args, train_dataset=rows_from(data), batch_sizes=GROWS)
    trainer.train()
    assert list(trainer.sizes) == [2, 2, 2, 3, 3, 3, 2, 6, 6, 5]
    assert trainer.state.max_steps == len(trainer.sizes)


@pytest.mark.parametrize("saved", [2, 3, 4, 7, 8])
def test_a_schedule_resumes_to_the_bit(saved, tmp_path):
    data = token_batches(17)
    options = {"max_steps": -1, "num_train_epochs": 2, "save_strategy": "steps", "save_steps": 1}
    whole = make_trainer(tmp_path, data, options=options, batch_sizes=GROWS)
    whole.train()
    again = make_trainer(tmp_path, data, options=options, batch_sizes=GROWS)
    again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{saved}"))
    assert history(again) == history(whole)
    for found, wanted in zip(again.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(found, wanted)
