"""Hugging Face's Trainer, which logs the noise scale and grows its batch by a schedule."""

import argparse
import math
import tempfile
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from steadygrad.integrations.transformers import SteadygradMixin
from steadygrad.noise import BatchSizeSchedule


class MyTrainer(SteadygradMixin, Trainer):
    """The Trainer, with the mixin first."""


torch.manual_seed(0)

# Bytes of one of Python's own modules, in rows of 32; the labels of each row are padded.
source = Path(argparse.__file__).read_bytes()[: 32 * 1000]
text = torch.tensor(list(source)).view(-1, 32) % 128
labels = torch.where(torch.arange(32) < torch.randint(8, 33, (len(text), 1)), text, -100)
rows = [{"input_ids": x, "labels": y} for x, y in zip(text, labels, strict=True)]

config = GPT2Config(
    vocab_size=128, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
)
model = GPT2LMHeadModel(config)
model.loss_type = "ForCausalLM"

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        folder,
        per_device_train_batch_size=4,
        max_steps=40,
        learning_rate=3e-3,
        bf16=True,
        use_cpu=True,
        logging_steps=10,
        save_strategy="no",
        disable_tqdm=True,
        report_to="none",
    )
    trainer = MyTrainer(
        model,
        args,
        train_dataset=rows,
        batch_sizes=BatchSizeSchedule(
            [{"from_samples": 0, "batch_size": 8}, {"from_samples": 160, "batch_size": 16}]
        ),
    )
    trainer.train()

print("step  batch  noise scale")
for row in trainer.state.log_history[:-1]:
    value, low = (row[f"steadygrad/noise_scale/{name}"] for name in ("value", "low"))
    # The interval has no upper end while the estimate is unresolved.
    high = row.get("steadygrad/noise_scale/high", math.inf)
    print(
        f"{row['step']:4}  {row['steadygrad/batch_size']:5}  {value:4.1f} [{low:.1f}, {high:.1f}]"
    )
