"""Balanced losses and float16 by layers in Hugging Face's Trainer; the code of its page."""

from itertools import pairwise

import pytest
import torch

from steadygrad.balance import LossBalancer
from steadygrad.scale import LayerwiseGradScaler
from tests.integrations import by_hand
from tests.integrations.by_hand import ACCUMULATION, STEPS, chunks, rows_from, token_batches
from tests.integrations.pages import after, blocks, run

transformers = pytest.importorskip("transformers", reason="group integrations")

from tests.integrations.test_transformers import (  # noqa: E402
    ONE_EPOCH,
    SAVED,
    SteadygradMixin,
    Trainer,
    arguments,
    logs,
    make_model,
    make_trainer,
)

PAGE = "transformers.md"


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
    evaluated = trainer.evaluate(rows_from(batches[:1]))["eval_loss"]
    with torch.no_grad():
        losses, _ = trainer.compute_losses(model, batches[0], lambda y: {"text": y, "size": y})
    assert evaluated == pytest.approx(float(sum(losses.values())), rel=1e-4)
    assert logs(trainer)[-1]["steadygrad/balancer/target_size"] == 0.75
    again = make_balanced(tmp_path, batches)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    by_hand.assert_same(again.model, trainer.model)


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
    by_hand.assert_same(again.model, trainer.model)


@pytest.mark.parametrize("noise_scale", [False, True])
def test_each_model_of_model_init_has_a_scaler(noise_scale, tmp_path):
    batches, given = token_batches(ACCUMULATION * STEPS), {"model_init": lambda: make_model()}
    given |= {"grad_scaler": scaler_of, "noise_scale": noise_scale}
    trainer, models, states = make_trainer(tmp_path, batches, options=FP16, **given), [], []
    for _ in range(2):
        trainer.train()
        models.append(trainer.model)
        states.append(trainer.accelerator.scaler.state_dict())
        assert not noise_scale or int(trainer.noise.estimate().measurements) == STEPS
    assert by_hand.hooks_of(models[0]) == 0
    assert by_hand.hooks_of(models[1]) > 0
    assert states[0] == states[1]
    by_hand.assert_same(*models)


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
    by_hand.assert_same(trainer.model, make_model())


def test_the_pages_code_trains(tmp_path):
    names = {
        "Trainer": transformers.Trainer,
        "SteadygradMixin": SteadygradMixin,
        "LossBalancer": LossBalancer,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "model": make_model(),
        "args": arguments(tmp_path),
        "data": rows_from(token_batches(ACCUMULATION * STEPS)),
    }
    found = run(after(blocks(PAGE, "diff")[0]), names, PAGE)
    assert int(found["trainer"].noise.estimate().measurements) == STEPS
    found = run(blocks(PAGE, "python")[0], names, PAGE)
    found["trainer"].train()
    assert found["trainer"].balancer.metrics["target_size"] == pytest.approx(0.1 / 1.1)
