"""One training after another in Hugging Face's Trainer: each begins without hooks of the last."""

import pytest
import torch

from tests.integrations.by_hand import token_batches
from tests.integrations.test_transformers import (
    ACCUMULATION,
    STEPS,
    Trainer,
    arguments,
    make_model,
    make_trainer,
    rows_from,
)
from tests.integrations.test_transformers_tools import FP16, scaler_of


def hooks_of(model):
    """Hooks on its weights, and on it and the modules within."""
    weights = sum(len(p._backward_hooks or ()) for p in model.parameters())
    return weights + sum(len(m._forward_hooks | m._forward_pre_hooks) for m in model.modules())


def test_each_training_has_a_history_of_its_own(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    trainer = make_trainer(tmp_path, batches, gradient_watch=True)
    for _ in range(2):
        trainer.train()
        assert int(trainer.noise.estimate().measurements) == STEPS
        assert int(trainer.noise.altered) == hooks_of(trainer.model) == 0
    assert trainer.findings == []


def fresh_model():
    return make_model()


def test_each_model_of_model_init_is_measured(tmp_path):
    data, rings = rows_from(token_batches(ACCUMULATION * STEPS)), []
    trainer = Trainer(model_init=fresh_model, args=arguments(tmp_path), train_dataset=data)
    for _ in range(2):
        trainer.train()
        rings.append(trainer.noise.state_dict()["ring"])
    assert torch.equal(*rings)
    assert int(trainer.noise.estimate().measurements) == STEPS


def test_each_model_of_model_init_has_a_scaler(tmp_path):
    data, models, states = rows_from(token_batches(ACCUMULATION * STEPS)), [], []
    trainer = Trainer(
        model_init=fresh_model, args=arguments(tmp_path, **FP16), train_dataset=data,
        grad_scaler=scaler_of, noise_scale=False,
    )  # fmt: skip
    for _ in range(2):
        trainer.train()
        models.append(trainer.model)
        states.append(trainer.accelerator.scaler.state_dict())
    assert hooks_of(models[0]) == 0
    assert hooks_of(models[1]) > 0
    assert states[0] == states[1]
    pairs = zip(models[0].parameters(), models[1].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


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
    data = rows_from(token_batches(ACCUMULATION * STEPS))
    args = arguments(tmp_path, auto_find_batch_size=True)
    trainer = Full(make_model(), args, train_dataset=data)
    trainer.train()
    assert trainer.calls == ACCUMULATION + 2 + ACCUMULATION * STEPS
    assert int(trainer.noise.estimate().measurements) == STEPS
    assert int(trainer.noise.altered) == int(trainer.noise.skipped) == 0


class Root(torch.nn.Module):
    """Its backward pass divides zero by zero."""

    def forward(self, x):
        return x + (0 * x).abs().sqrt()


def test_a_planted_fault_is_named_once(tmp_path):
    trainer = make_trainer(tmp_path, token_batches(ACCUMULATION * STEPS), gradient_watch=True)
    trainer.model.transformer.h[0].mlp.act = Root()
    with pytest.warns(UserWarning, match=r"Batch 0, rank 0: the backward pass of .*mlp\.act"):
        trainer.train()
    # After the first step the weights are not finite either.
    assert [(found.kind, found.name) for found in trainer.findings] == [
        ("gradient", "transformer.h.0.mlp.act")
    ]
    assert hooks_of(trainer.model) == 0
