"""
Are these two runs the same?
============================

A training was resumed, or got its batch in four parts in place of one, and learns a little worse.
The losses of the two runs differ in the fourth digit, and drift apart from there: is that rounding,
or a fault? ``Trace`` keeps sketches of what each step computes, and ``steadygrad diff`` names the
first step, stage and module at which two runs differ by more than rounding.
"""

import contextlib
import io
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from steadygrad.cli import main
from steadygrad.trace import Trace

torch.set_num_threads(1)  # tensors this small only wait for each other
folder = Path(tempfile.mkdtemp())

# %%
# One loop, two ways of cutting a batch
# -------------------------------------
#
# A batch has 32 rows. The loop takes it as a whole or in four micro-batches, whose losses it
# divides by their number. ``trace.step()`` after the optimizer's step is all that the trace needs.


def make() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def batch(step: int) -> tuple[Tensor, Tensor]:
    data = torch.Generator().manual_seed(step)
    return torch.randn(32, 16, generator=data), torch.randint(8, (32,), generator=data)


def train(name: str, micros: int, divisor: int, forget: int | None = None) -> float:
    model, optimizer = make()
    with Trace(model, optimizer, folder / name) as trace:
        for step in range(20):
            optimizer.zero_grad()
            x, labels = batch(step)
            for part, own in zip(x.chunk(micros), labels.chunk(micros), strict=True):
                loss = F.cross_entropy(model(part), own)
                (loss / divisor).backward()
            if step == forget:
                optimizer.state.clear()
            optimizer.step()
            trace.step()
    return loss.item()


train("whole", micros=1, divisor=1)
train("parts", micros=4, divisor=4)


def diff(a: str, b: str) -> None:
    """``steadygrad diff A B`` in a terminal."""
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        code = main(["diff", str(folder / a), str(folder / b)])
    print(text.getvalue().partition("\n\n")[0], f"\nexit code {code}")


diff("whole", "parts")

# %%
# Sums in another order round otherwise, and training makes these differences grow. A value that
# differs by no more than what it was computed from is no culprit, so this is the same training.
#
# A divisor that is forgotten
# ---------------------------
#
# Without the division the gradient is four times as large. Adam hides that: its step does not
# depend on the gradient's size, and the losses look almost right.

train("no divisor", micros=4, divisor=1)
diff("whole", "no divisor")

# %%
# The outputs of all modules agree, and the gradient at the last one does not. What lies between the
# two is the loss. The factor says what to look for.
#
# A state that is lost
# --------------------
#
# At step 7 this run loses what its optimizer has gathered, as after a resume from a checkpoint
# without the optimizer's state.

train("lost", micros=1, divisor=1, forget=7)
diff("whole", "lost")

# %%
# Seven steps agree to the last digit, and so do the weights, the forward and the backward pass of
# the eighth. The page that the command writes has the distance of the runs by module and step.
