"""The other tools in Hugging Face's Trainer: two processes, balanced losses, float16 by layers."""

import copy
import os

import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.balance import LossBalancer
from steadygrad.noise import BatchSizeSchedule
from steadygrad.scale import LayerwiseGradScaler
from tests.distributed.ranks import on_ranks
from tests.integrations.by_hand import (
    IGNORED,
    NoiseByHand,
    assert_trained_alike,
    flat_gradient,
    summed_loss,
    token_batches,
    train_by_hand,
)
from tests.integrations.pages import after, blocks, run

transformers = pytest.importorskip("transformers", reason="group integrations")

from steadygrad.integrations.transformers import SteadygradMixin  # noqa: E402
from tests.integrations.test_transformers import (  # noqa: E402
    ACCUMULATION,
    STEPS,
    Trainer,
    adamw,
    arguments,
    chunks,
    make_model,
    make_trainer,
    rows_from,
)

RANKS = 2
PAGE = "transformers.md"


def train_on_rank(rank, world, folder):
    # The process group is there already, over a file; this is how Accelerate learns of it.
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    batches = token_batches(RANKS * ACCUMULATION * STEPS)
    options = {"ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(folder, batches, options=options)
    trainer.train()
    estimate = trainer.noise.estimate().as_dict()
    again = make_trainer(folder, batches, options=options)
    again.train(resume_from_checkpoint=f"{folder}/checkpoint-3")
    pairs = zip(again.model.parameters(), trainer.model.parameters(), strict=True)
    return {
        "value": estimate["value"],
        "kind": trainer.noise.world.kind,
        "altered": int(trainer.noise.altered),
        "weights": [p.tolist() for p in trainer.model.parameters()],
        "resumed": all(torch.equal(a, b) for a, b in pairs)
        and again.noise.estimate().as_dict() == estimate,
    }


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path / "trained"))
    model = make_model()
    batches = token_batches(RANKS * ACCUMULATION * STEPS)
    expected = train_by_hand(model, chunks(batches, RANKS * ACCUMULATION), adamw(model))
    assert [row["kind"] for row in found] == ["ddp"] * RANKS
    assert found[0]["value"] == found[1]["value"] == pytest.approx(expected.value, rel=1e-3)
    assert [row["altered"] for row in found] == [0] * RANKS
    assert [row["resumed"] for row in found] == [True] * RANKS
    trained = make_model()
    with torch.no_grad():
        for p, values in zip(trained.parameters(), found[0]["weights"], strict=True):
            p.copy_(torch.tensor(values))
    assert_trained_alike(trained, model, make_model())


class Balanced(Trainer):
    """Cross-entropy, and the logits' size as a second loss."""

    def compute_losses(self, model, inputs, fork):
        outputs = model(input_ids=inputs["input_ids"])
        logits = fork(outputs.logits)
        targets = inputs["labels"][:, 1:].reshape(-1)
        flat = logits["text"][:, :-1].float().flatten(0, 1)
        text = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED)
        return {"text": text, "size": logits["size"].float().square().mean()}, outputs


def losses_of(model, batch, micro_batches):
    """Both losses, divided by the number of micro-batches, and the logits."""
    logits = model(input_ids=batch["input_ids"]).logits
    targets = batch["labels"][:, 1:].reshape(-1)
    flat = logits[:, :-1].float().flatten(0, 1)
    text = torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORED)
    losses = {"text": text, "size": logits.float().square().mean()}
    return {name: loss / micro_batches for name, loss in losses.items()}, logits


def balanced_by_hand(model, batches, balancer, lr):
    """The Trainer's step by hand, with audiocraft's form of the balancer."""
    parameters = [*model.parameters()]
    optimizer = adamw(model, lr)
    for window in chunks(batches):
        optimizer.zero_grad()
        for batch in window:
            losses, logits = losses_of(model, batch, len(window))
            balancer.backward(losses, logits, accumulation_steps=len(window))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def test_balanced_losses_are_those_of_a_loop_by_hand(tmp_path):
    # The last window has two micro-batches.
    batches = token_batches(ACCUMULATION * STEPS - 2)
    options = {"save_strategy": "steps", "save_steps": 3, "max_steps": -1, "num_train_epochs": 1}
    # In bfloat16 the two forms round the sum of gradients at another place.
    options["bf16"] = False

    def make():
        balancer = LossBalancer({"text": 1, "size": 3})
        given = arguments(tmp_path, **options)
        return Balanced(make_model(), given, train_dataset=rows_from(batches), balancer=balancer)

    trainer = make()
    model, start = copy.deepcopy(trainer.model), copy.deepcopy(trainer.model)
    balancer = LossBalancer({"text": 1, "size": 3})
    trainer.train()
    balanced_by_hand(model, batches, balancer, 1e-2)
    assert trainer.state.global_step == STEPS
    assert_trained_alike(trainer.model, model, start)
    evaluated = trainer.evaluate(rows_from(batches[:1]))["eval_loss"]
    with torch.no_grad():
        losses, _ = trainer.compute_losses(model, batches[0], lambda y: {"text": y, "size": y})
    assert evaluated == pytest.approx(float(sum(losses.values())), rel=1e-4)
    logged = [row for row in trainer.state.log_history if "loss" in row][-1]
    assert logged["steadygrad/balancer/target_size"] == 0.75
    again = make()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for found, wanted in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def scaler_of(model):
    scales = {"transformer.h.*": 2.0**6}
    return LayerwiseGradScaler(model, scales, init_scale=2.0**8, growth_interval=2)


FP16 = {"bf16": False, "fp16": True}


def test_float16_by_layers_is_that_of_a_loop_by_hand(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    options = {**FP16, "save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(tmp_path, batches, options=options, grad_scaler=scaler_of)
    model = copy.deepcopy(trainer.model)
    expected = train_by_hand(model, chunks(batches), adamw(model), dtype=torch.float16)
    trainer.train()
    estimate = trainer.noise.estimate()
    assert int(trainer.noise.skipped) == int(trainer.noise.altered) == 0
    assert trainer.accelerator.scaler.get_scales()["transformer.h.0"] == 2.0 ** (6 + STEPS // 2)
    # float16 rounds the scaled gradients, where they are subnormal, at another place.
    assert float(estimate.value) == pytest.approx(expected.value, rel=1e-3)
    again = make_trainer(tmp_path, batches, options=options, grad_scaler=scaler_of)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    for found, wanted in zip(again.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_an_overflow_is_skipped_and_the_learning_rate_waits(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)

    def overflowing(model):
        return LayerwiseGradScaler(model, {"transformer.h.0": 2.0**40}, init_scale=2.0**8)

    # Fused optimizers skip by themselves, which Accelerate 1.15 does not see (its issue 4242).
    options = {**FP16, "lr_scheduler_type": "linear", "max_steps": 1, "optim": "adamw_torch"}
    trainer = make_trainer(tmp_path, batches, options=options, grad_scaler=overflowing)
    before = copy.deepcopy(trainer.model)
    trainer.train()
    assert trainer.accelerator.scaler.culprits() == ["transformer.h.0"]
    assert int(trainer.noise.skipped) == 1
    assert trainer.accelerator.optimizer_step_was_skipped
    assert trainer.lr_scheduler.last_epoch == 0
    for found, wanted in zip(trainer.model.parameters(), before.parameters(), strict=True):
        assert torch.equal(found, wanted)


def test_a_last_window_of_one_micro_batch_is_not_measured(tmp_path):
    batches = token_batches(ACCUMULATION + 1)
    trainer = make_trainer(tmp_path, batches, options={"max_steps": -1, "num_train_epochs": 1})
    trainer.train()
    assert trainer.state.global_step == 2
    assert int(trainer.noise.estimate().measurements) == 1


def test_refusals(tmp_path):
    batches = token_batches(ACCUMULATION)
    trainer = make_trainer(tmp_path, batches, options={"gradient_accumulation_steps": 1})
    with pytest.raises(InputError, match=r"two micro-batches a step .*Found 1\. Remedy"):
        trainer.train()
    odd = BatchSizeSchedule([{"from_samples": 0, "batch_size": 5}])
    with pytest.raises(InputError, match=r"multiple of 2, .*Found 5\. Remedy"):
        make_trainer(tmp_path, batches, batch_sizes=odd)


def test_a_damaged_state_is_refused(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    options = {"save_strategy": "steps", "save_steps": 3}
    make_trainer(tmp_path, batches, options=options).train()
    (tmp_path / "checkpoint-3" / "steadygrad-state.pt").write_bytes(b"not a checkpoint")
    trainer = make_trainer(tmp_path, batches, options=options)
    with pytest.raises(InputError, match=r"Found a file that cannot be read .*Remedy"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))


def test_evaluation_is_left_alone(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    trainer = make_trainer(tmp_path, batches)
    trainer.train()
    before = trainer.noise.state_dict()["ring"].clone()
    loss = trainer.evaluate(rows_from(batches[:2]))["eval_loss"]
    with torch.no_grad():
        expected = sum(float(summed_loss(trainer.model, batch)) for batch in batches[:2])
    assert loss > 0
    assert expected > 0
    assert torch.equal(trainer.noise.state_dict()["ring"], before)


def test_noise_of_balanced_losses_is_that_of_a_loop_by_hand(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    # Weights stand still, so that the two forms of the balancer cannot drift apart.
    given = arguments(tmp_path, bf16=False, learning_rate=0.0)
    data, shares = rows_from(batches), {"text": 1, "size": 3}
    trainer = Balanced(make_model(), given, train_dataset=data, balancer=LossBalancer(shares))
    model, balancer, expected = make_model(), LossBalancer(shares), NoiseByHand()
    trainer.train()
    for window in chunks(batches):
        gradients = []
        for batch in window:
            model.zero_grad()
            losses, logits = losses_of(model, batch, len(window))
            balancer.backward(losses, logits, accumulation_steps=len(window))
            gradients.append(flat_gradient([*model.parameters()]) * len(window))
        counts = [len(batch["labels"]) for batch in window]
        # Each micro-batch is as much of the step, however many labels it has.
        expected.step(gradients, [1 / len(window)] * len(window), counts)
    assert int(trainer.noise.altered) == 0
    assert float(trainer.noise.estimate().value) == pytest.approx(expected.value, rel=1e-3)


def names_of(tmp_path, **options):
    """Names that the page's code takes for granted."""
    return {
        "Trainer": transformers.Trainer,
        "SteadygradMixin": SteadygradMixin,
        "LossBalancer": LossBalancer,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "model": make_model(),
        "args": arguments(tmp_path, **options),
        "data": rows_from(token_batches(ACCUMULATION * STEPS)),
    }


def test_the_pages_diff_measures(tmp_path):
    found = run(after(blocks(PAGE, "diff")[0]), names_of(tmp_path), PAGE)
    assert int(found["trainer"].noise.estimate().measurements) == STEPS


def test_the_pages_balanced_trainer_trains(tmp_path):
    found = run(blocks(PAGE, "python")[0], names_of(tmp_path), PAGE)
    found["trainer"].train()
    assert found["trainer"].balancer.metrics["target_size"] == pytest.approx(0.1 / 1.1)


def test_a_gradient_scaler_without_float16_is_refused(tmp_path):
    batches = token_batches(ACCUMULATION)
    trainer = make_trainer(tmp_path, batches, options={"bf16": False}, grad_scaler=scaler_of)
    with pytest.raises(InputError, match="fp16=True"):
        trainer.train()
