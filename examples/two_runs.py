"""Resumes a training wrongly on purpose, and asks where the two runs part."""

import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from steadygrad.trace import Trace

folder = Path(tempfile.mkdtemp())


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 3))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, name: str | None = None
) -> None:
    trace = Trace(model, optimizer, folder / name, start=steps.start) if name else None
    for step in steps:
        data = torch.Generator().manual_seed(step)
        x, labels = torch.randn(16, 8, generator=data), torch.randint(3, (16,), generator=data)
        loss = F.cross_entropy(model(x), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if trace:
            trace.step(loss)  # the only other line


torch.manual_seed(0)
model, optimizer = make()
train(model, optimizer, range(5))
checkpoint = {"model": model.state_dict(), "random": torch.get_rng_state()}
torch.save(checkpoint, folder / "checkpoint.pt")  # without the optimizer
train(model, optimizer, range(5, 9), "straight_on")

saved = torch.load(folder / "checkpoint.pt", weights_only=True)
model, optimizer = make()
model.load_state_dict(saved["model"])
torch.set_rng_state(saved["random"])
train(model, optimizer, range(5, 9), "resumed")

command = [sys.executable, "-m", "steadygrad", "diff", "straight_on", "resumed"]
done = subprocess.run(command, cwd=folder, check=False)
print("exit code", done.returncode)
