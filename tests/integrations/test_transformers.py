"""Hugging Face's own Trainer on a random GPT-2 with all tools, against a loop by hand."""

import copy
import json
import os
from itertools import pairwise

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.balance import LossBalancer
from steadygrad.noise import BatchSizeSchedule
from steadygrad.optim import LANS
from steadygrad.scale import LayerwiseGradScaler
from tests.contracts.problems import assert_same, hooks_of
from tests.distributed.ranks import on_ranks
from tests.integrations import by_hand
from tests.integrations.by_hand import ACCUMULATION, RANKS, ROWS, STEPS, chunks, token_batches
from tests.integrations.pages import after, blocks, run

transformers = pytest.importorskip("transformers", reason="group integrations")

from steadygrad.integrations.transformers import SteadygradMixin  # noqa: E402

PAGE = "transformers.md"


def make_model():
    model = by_hand.gpt2()
    # Else transformers 5.23 divides by labels that its loss does not have; see its own test below.
    model.loss_type = "ForCausalLM"
    return model


class Trainer(SteadygradMixin, transformers.Trainer):
    """As on the page."""


def arguments(folder, **options):
    given = {
        "per_device_train_batch_size": ROWS, "gradient_accumulation_steps": ACCUMULATION,
        "max_steps": STEPS, "train_sampling_strategy": "sequential", "bf16": True, "use_cpu": True,
        "logging_steps": 1, "save_strategy": "no", "lr_scheduler_type": "constant",
        "learning_rate": 1e-2, "disable_tqdm": True, **options,
    }  # fmt: skip
    return transformers.TrainingArguments(str(folder), **given)


SAVED = {"save_strategy": "steps", "save_steps": 3}
ONE_EPOCH = {"max_steps": -1, "num_train_epochs": 1}


def make_trainer(folder, batches, kind=Trainer, options=None, **given):
    if "model_init" not in given:
        given = {"model": make_model(), **given}
    options = arguments(folder, **(options or {}))
    return kind(args=options, train_dataset=by_hand.rows_from(batches), **given)


def logs(trainer):
    return [row for row in trainer.state.log_history if "loss" in row]


@pytest.mark.parametrize(
    ("loss_type", "uncounted", "noise_scale"),
    [("ForCausalLM", 0, True), (None, 1, {"samples": ROWS})],
    ids=["labels", "GPT-2 as it is divides by more labels than it has"],
)
def test_noise_scale_is_that_of_a_loop_by_hand(loss_type, uncounted, noise_scale, tmp_path):
    batches, model = token_batches(ACCUMULATION * STEPS), make_model()
    model.loss_type = loss_type
    twin, options = copy.deepcopy(model), {"lr": 1e-2, "weight_decay": 0.0}
    optimizer = LANS(twin.named_parameters(), **options)
    expected = by_hand.train_by_hand(twin, chunks(batches), optimizer, uncounted=uncounted)
    optimizers = LANS(model.named_parameters(), **options), None
    given = {"model": model, "optimizers": optimizers, "noise_scale": noise_scale}
    trainer = make_trainer(tmp_path, batches, **given)
    trainer.train()
    assert trainer.args.max_grad_norm == 1.0
    by_hand.assert_measured(trainer.noise, expected)
    by_hand.assert_trained_alike(model, twin, make_model())
    rows = logs(trainer)
    assert len(rows) == STEPS
    trace = float(trainer.noise.estimate().noise_trace)
    assert rows[-1]["steadygrad/noise_scale/noise_trace"] == pytest.approx(trace)
    assert rows[-1]["steadygrad/noise_scale/altered"] == 0
    json.dumps(rows, allow_nan=False)


class Plain(Trainer):
    """The usual override, which says that its loss is a mean over one micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def summed_loss(outputs, labels, num_items_in_batch=None):
    return by_hand.next_tokens(outputs.logits, labels, "sum") / num_items_in_batch


@pytest.mark.parametrize(
    ("kind", "function", "by_tokens"),
    [(Plain, None, False), (Trainer, summed_loss, True)],
    ids=["plain", "function"],
)
def test_micro_batches_weigh_as_the_trainer_is_told(kind, function, by_tokens, tmp_path):
    batches, model = token_batches(ACCUMULATION * STEPS), make_model()
    still = by_hand.adamw(model, lr=0.0)
    expected = by_hand.train_by_hand(model, chunks(batches), still, by_tokens=by_tokens)
    trainer = make_trainer(
        tmp_path, batches, kind, {"learning_rate": 0.0}, compute_loss_func=function
    )
    trainer.train()
    by_hand.assert_measured(trainer.noise, expected)


def test_labels_that_are_shifted_already_count_whole(tmp_path):
    trainer = make_trainer(tmp_path, token_batches(2))
    labels = torch.tensor([[1, by_hand.IGNORED, 3], [4, 5, by_hand.IGNORED]])
    assert trainer._weight({"shift_labels": labels, "labels": labels}, 8) == 4 / 8
    assert trainer._weight({"labels": labels}, 8) == 2 / 8


def train_on_rank(rank, world, folder):
    # The process group is there already, over a file; this is how Accelerate learns of it.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    batches = token_batches(RANKS * 2 * STEPS)
    options = {"ddp_backend": "gloo", "gradient_accumulation_steps": 2, **SAVED}
    trainer, again = (make_trainer(folder, batches, options=options) for _ in range(2))
    trainer.train()
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    assert_same(again.model.parameters(), trainer.model.parameters())
    assert again.noise.estimate().as_dict() == trainer.noise.estimate().as_dict()
    return by_hand.found_on_rank(trainer.noise)


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path / "trained"))
    model, batches = make_model(), token_batches(RANKS * 2 * STEPS)
    windows = chunks(batches, RANKS * 2)
    expected = by_hand.train_by_hand(model, windows, by_hand.adamw(model))
    by_hand.assert_measured_on_ranks(found, "ddp", expected)


class Windows(Trainer):
    """Notes the micro-batches of each step."""

    sizes, open = (), 0

    def training_step(self, *args):
        loss = super().training_step(*args)
        self.open += 1
        if self.accelerator.sync_gradients:
            self.sizes, self.open = (*self.sizes, self.open), 0
        return loss


@pytest.mark.parametrize(
    ("batches", "options", "expected"),
    [
        (60, {"max_steps": 9}, [2, 2, 2, 3, 3, 3, 3, 6, 6]),
        (17, {"max_steps": 8}, [2, 2, 2, 3, 3, 3, 2, 6]),
        (17, {"max_steps": -1, "num_train_epochs": 2}, [2, 2, 2, 3, 3, 3, 2, 6, 6, 5]),
    ],
    ids=["one epoch", "steps of two epochs", "two epochs"],
)
def test_a_schedule_of_batch_sizes_cuts_no_window(batches, options, expected, tmp_path):
    trainer = make_trainer(
        tmp_path, token_batches(batches), Windows, options, batch_sizes=by_hand.GROWS
    )
    trainer.train()
    assert list(trainer.sizes) == expected
    assert trainer.state.global_step == trainer.state.max_steps == len(expected)
    # At an epoch's end a window is shorter than what the Trainer is set to accumulate.
    sizes = [row["steadygrad/batch_size"] for row in logs(trainer)]
    assert sizes == [4, 4, 4, 6, 6, 6, 6, 12, 12, 12][: len(expected)]


def test_a_schedule_resumes_to_the_bit(tmp_path):
    def trained(checkpoint=None):
        trainer = make_trainer(
            tmp_path,
            token_batches(17),
            options={"max_steps": -1, "num_train_epochs": 2, **SAVED, "save_steps": 1},
            batch_sizes=by_hand.GROWS,
            optimizer_cls_and_kwargs=(LANS, {"lr": 1e-2}),
        )
        trainer.train(resume_from_checkpoint=checkpoint)
        return trainer

    def history(trainer):
        return [
            {k: v for k, v in row.items() if k.startswith(("step", "steady", "loss", "grad_norm"))}
            for row in logs(trainer)
        ]

    whole = trained()
    assert history(whole)[-1]["steadygrad/optimizer/skipped"] == 0
    # Where the batch grows, at an epoch's end, and within the next epoch.
    for steps in (3, 7, 8):
        again = trained(str(tmp_path / f"checkpoint-{steps}"))
        assert history(again) == history(whole)
        assert_same(again.model.parameters(), whole.model.parameters())
        assert torch.equal(again.noise.state_dict()["ring"], whole.noise.state_dict()["ring"])
    saved = torch.load(tmp_path / "checkpoint-3" / "steadygrad-state.pt", weights_only=True)
    assert saved["noise"]["steps"] == 3


def test_each_training_has_a_history_of_its_own(tmp_path):
    trainer = make_trainer(tmp_path, token_batches(ACCUMULATION * STEPS), gradient_watch=True)
    for _ in range(2):
        trainer.train()
        assert int(trainer.noise.estimate().measurements) == STEPS
        assert int(trainer.noise.altered) == hooks_of(trainer.model) == 0
    assert trainer.findings == []


class Full(Trainer):
    """Runs out of memory once, within a window."""

    calls = 0

    def training_step(self, *args):
        loss = super().training_step(*args)
        self.calls += 1
        if self.calls == ACCUMULATION + 2:
            raise RuntimeError("CUDA out of memory.")
        return loss


def test_a_window_that_ran_out_of_memory_is_forgotten(tmp_path):
    batches, options = token_batches(ACCUMULATION * STEPS), {"auto_find_batch_size": True}
    trainer = make_trainer(tmp_path, batches, Full, options)
    trainer.train()
    assert trainer.calls == ACCUMULATION + 2 + ACCUMULATION * STEPS
    assert int(trainer.noise.estimate().measurements) == STEPS
    assert int(trainer.noise.altered) == int(trainer.noise.skipped) == 0


def test_a_last_window_of_one_micro_batch_is_not_measured(tmp_path):
    trainer = make_trainer(tmp_path, token_batches(ACCUMULATION + 1), options=ONE_EPOCH)
    trainer.train()
    assert trainer.state.global_step == 2
    assert int(trainer.noise.estimate().measurements) == 1


def test_a_planted_fault_is_named_once(tmp_path):
    trainer = make_trainer(tmp_path, token_batches(ACCUMULATION * STEPS), gradient_watch=True)
    trainer.model.transformer.h[0].mlp.act = bad = by_hand.BadBackward()
    bad.broken = True
    with pytest.warns(UserWarning, match=r"Batch 0, rank 0: the backward pass of .*mlp\.act"):
        trainer.train()
    # After the first step the weights are not finite either.
    assert [(found.kind, found.name) for found in trainer.findings] == [
        ("gradient", "transformer.h.0.mlp.act")
    ]
    assert hooks_of(trainer.model) == 0


ODD = BatchSizeSchedule([{"from_samples": 0, "batch_size": 5}])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"noise_scale": 1}, "`noise_scale`"),
        ({"noise_scale": None}, "`noise_scale`"),
        ({"batch_sizes": [8, 16]}, "`schedule`"),
        ({"batch_sizes": ODD}, "multiple of 2"),
        ({"grad_scaler": torch.amp.GradScaler}, "`grad_scaler`"),
        ({"options": {"gradient_accumulation_steps": 1}}, "two micro-batches"),
    ],
)
def test_refusals(given, words, tmp_path):
    with pytest.raises(InputError, match=words):
        make_trainer(tmp_path, token_batches(ACCUMULATION), **given).train()


# Balanced losses, float16 by layers, and the code of the page


def losses_of(texts, sizes, labels):
    """Cross-entropy, and the logits' size as a second loss."""
    return {"text": by_hand.next_tokens(texts, labels), "size": sizes.float().square().mean()}


class Balanced(Trainer):
    def compute_losses(self, model, inputs, fork):
        outputs = model(input_ids=inputs["input_ids"])
        logits = fork(outputs.logits)
        return losses_of(logits["text"], logits["size"], inputs["labels"]), outputs


def balanced_by_hand(model, batches, lr=1e-2):
    """The Trainer's step by hand, with audiocraft's form of the balancer."""
    parameters, optimizer = [*model.parameters()], by_hand.adamw(model, lr)
    balancer, noise = LossBalancer({"text": 1, "size": 3}), by_hand.NoiseByHand()
    for window in chunks(batches):
        optimizer.zero_grad()
        ends = [torch.zeros(())]
        for batch in window:
            logits = model(input_ids=batch["input_ids"]).logits
            losses = losses_of(logits, logits, batch["labels"])
            losses = {name: loss / len(window) for name, loss in losses.items()}
            balancer.backward(losses, logits, accumulation_steps=len(window))
            ends.append(by_hand.flat_gradient(parameters))
        gradients = [(b - a) * len(window) for a, b in pairwise(ends)]
        counts = [len(batch["labels"]) for batch in window]
        # Each micro-batch is as much of the step, however many labels it has.
        noise.step(gradients, [1 / len(window)] * len(window), counts)
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
    return noise


def make_balanced(folder, batches, **options):
    # In bfloat16 the two forms round the sum of gradients at another place.
    options = {**SAVED, **ONE_EPOCH, "bf16": False, **options}
    balancer = LossBalancer({"text": 1, "size": 3})
    return make_trainer(folder, batches, Balanced, options, balancer=balancer)


def test_balanced_losses_are_those_of_a_loop_by_hand(tmp_path):
    # The last window has two micro-batches.
    batches, model = token_batches(ACCUMULATION * STEPS - 2), make_model()
    trainer = make_balanced(tmp_path, batches)
    trainer.train()
    balanced_by_hand(model, batches)
    assert trainer.state.global_step == STEPS
    by_hand.assert_trained_alike(trainer.model, model, make_model())
    evaluated = trainer.evaluate(by_hand.rows_from(batches[:1]))["eval_loss"]
    with torch.no_grad():
        losses, _ = trainer.compute_losses(model, batches[0], lambda y: {"text": y, "size": y})
    assert evaluated == pytest.approx(float(sum(losses.values())), rel=1e-6)
    assert logs(trainer)[-1]["steadygrad/balancer/target_size"] == 0.75
    again = make_balanced(tmp_path, batches)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(again.model.parameters(), trainer.model.parameters())


def test_noise_of_balanced_losses_is_that_of_a_loop_by_hand(tmp_path):
    # Weights stand still, so that the two forms of the balancer cannot drift apart.
    batches = token_batches(ACCUMULATION * STEPS)
    trainer = make_balanced(tmp_path, batches, learning_rate=0.0)
    trainer.train()
    by_hand.assert_measured(trainer.noise, balanced_by_hand(make_model(), batches, lr=0.0))


def scaler_of(model):
    scales = {"transformer.h.*": 2.0**6}
    return LayerwiseGradScaler(model, scales, init_scale=2.0**8, growth_interval=2)


FP16 = {"bf16": False, "fp16": True}


def test_float16_by_layers_is_that_of_a_loop_by_hand(tmp_path):
    batches, options = token_batches(ACCUMULATION * STEPS), {**FP16, **SAVED}
    model = make_model()
    expected = by_hand.train_by_hand(
        model, chunks(batches), by_hand.adamw(model), dtype=torch.float16
    )
    trainer, again = (
        make_trainer(tmp_path, batches, options=options, grad_scaler=scaler_of) for _ in range(2)
    )
    trainer.train()
    # float16 rounds the scaled gradients, where they are subnormal, at another place.
    by_hand.assert_measured(trainer.noise, expected)
    assert trainer.accelerator.scaler.get_scales()["transformer.h.0"] == 2.0 ** (6 + STEPS // 2)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert_same(again.model.parameters(), trainer.model.parameters())


@pytest.mark.parametrize("noise_scale", [False, True])
def test_each_model_of_model_init_has_a_scaler(noise_scale, tmp_path):
    batches, given = token_batches(ACCUMULATION * STEPS), {"model_init": make_model}
    given |= {"grad_scaler": scaler_of, "noise_scale": noise_scale}
    trainer, models, states = make_trainer(tmp_path, batches, options=FP16, **given), [], []
    for _ in range(2):
        trainer.train()
        models.append(trainer.model)
        states.append(trainer.accelerator.scaler.state_dict())
        assert not noise_scale or int(trainer.noise.estimate().measurements) == STEPS
    assert hooks_of(models[0]) == 0
    assert hooks_of(models[1]) > 0
    assert states[0] == states[1]
    assert_same(*(model.parameters() for model in models))


def test_an_overflow_is_skipped_and_the_learning_rate_waits(tmp_path):
    def overflowing(model):
        return LayerwiseGradScaler(model, {"transformer.h.0": 2.0**40}, init_scale=2.0**8)

    # Fused optimizers skip by themselves, which Accelerate 1.15 does not see (its issue 4242).
    options = {**FP16, "lr_scheduler_type": "linear", "max_steps": 1, "optim": "adamw_torch"}
    batches = token_batches(ACCUMULATION)
    trainer = make_trainer(tmp_path, batches, options=options, grad_scaler=overflowing)
    trainer.train()
    assert trainer.accelerator.scaler.culprits() == ["transformer.h.0"]
    assert int(trainer.noise.skipped) == 1
    assert trainer.accelerator.optimizer_step_was_skipped
    assert trainer.lr_scheduler.last_epoch == 0
    assert_same(trainer.model.parameters(), make_model().parameters())


def test_the_pages_code_trains(tmp_path):
    names = {
        "Trainer": transformers.Trainer,
        "SteadygradMixin": SteadygradMixin,
        "LossBalancer": LossBalancer,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "model": make_model(),
        "args": arguments(tmp_path),
        "data": by_hand.rows_from(token_batches(ACCUMULATION * STEPS)),
    }
    found = run(after(blocks(PAGE, "diff")[0]), names, PAGE)
    assert int(found["trainer"].noise.estimate().measurements) == STEPS
    found = run(blocks(PAGE, "python")[0], names, PAGE)
    found["trainer"].train()
    assert found["trainer"].balancer.metrics["target_size"] == pytest.approx(0.1 / 1.1)
