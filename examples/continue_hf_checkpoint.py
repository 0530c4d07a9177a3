"""Which batch size to go on with: a study that begins at a checkpoint of Hugging Face's Trainer.

Here a random GPT-2 of two layers trains for 100 steps first. Of a training of your own, name the
last ``checkpoint-N``, and as ``lr`` the rate at which it stands.
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from my_hf_task import counting, make_model, make_task
from torch import nn
from transformers import Trainer, TrainingArguments

import steadygrad


def train(folder: str) -> Path:
    """Trains for a while, and returns the folder of the checkpoint."""
    rows = [{**row, "labels": row["input_ids"]} for row in counting(0, 4_096)]
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=8,
        max_steps=100,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        save_steps=100,
        use_cpu=True,
        disable_tqdm=True,
        report_to="none",
    )
    torch.manual_seed(0)
    model = make_model()
    model.loss_type = "ForCausalLM"
    Trainer(model, args, train_dataset=rows).train()
    return Path(folder, "checkpoint-100")


def make_optimizer(model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """AdamW over the groups of the Trainer: the saved state is by their parameters' numbers."""
    decayed = Trainer.get_decay_parameter_names(None, model)
    groups = [
        {"params": [p for name, p in model.named_parameters() if (name in decayed) == decays]}
        for decays in (True, False)
    ]
    return torch.optim.AdamW(groups, lr, weight_decay=0.0)


with tempfile.TemporaryDirectory() as home:
    task = replace(
        make_task(),
        start=train(home),
        make_optimizer=make_optimizer,
        optimizer_takes="model",
    )
    size = {"samples": 64 * task.batch_size, "seeds": 4, "budget": "10m"}
    result = steadygrad.advise(task, **size, threads=1, out=Path(home, "run"), progress=False)

print(result)
print("status:", result.summary.status)
