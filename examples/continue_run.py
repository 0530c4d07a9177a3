"""Which batch size to go on with: a study that begins where a training stands.

python examples/continue_run.py
"""

import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from my_task import make_task

import steadygrad

BATCH, SEEN, WHOLE = 8, 256, 1280  # samples of a step, so far, and of the whole training

task = make_task()
with tempfile.TemporaryDirectory() as folder:
    # The training so far, by a loop of your own, and its checkpoint.
    torch.manual_seed(0)
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters(), task.lr)
    for batch in torch.randperm(len(task.train))[:SEEN].split(BATCH):
        task.per_sample_loss(model, task.train.batch(batch)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    path = Path(folder, "checkpoint.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)

    # The study: every training begins there, and is as long as what remains.
    result = steadygrad.advise(
        replace(task, start=path, batch_size=BATCH),
        samples=WHOLE - SEEN,
        seeds=12,
        budget="2m",
        threads=1,
        out=Path(folder, "run"),
        progress=False,
    )

print(result)
print("status:", result.summary.status)
