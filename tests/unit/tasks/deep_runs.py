"""The task digits-deep by one loss scale, by a scale for each layer, and by ``inspect``.

Run: python -m tests.unit.tasks.deep_runs SEED STEPS (prints JSON)
"""

import json
import sys
import tempfile
from pathlib import Path

import torch

from steadygrad.scale import LayerwiseGradScaler
from steadygrad.tasks import load_task
from tests.unit.studies.inspect.runs import look


def trained(make_scaler, seed, steps):
    """Validation loss, the final loss scale, and the largest float16 value of the forward pass."""
    task, largest = load_task("digits-deep"), 0.0
    torch.manual_seed(seed)
    model = task.make_model()
    scaler, optimizer = make_scaler(model), task.optimizer(model, task.lr)

    def look_at(module, args, output):
        nonlocal largest
        for value in output if isinstance(output, tuple) else (output,):
            if value.dtype == torch.float16:
                largest = max(largest, value.detach().abs().max().item())

    for module in model.modules():
        module.register_forward_hook(look_at)
    for _ in range(steps):
        batch = task.train.batch(torch.randint(len(task.train), (task.batch_size,)))
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
            loss = task.per_sample_loss(model, batch).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    with torch.autocast("cpu", torch.float16, enabled=scaler.is_enabled()):
        valid = task.evaluate(model, task.valid)
    return {"loss": valid, "scale": scaler.get_scale(), "forward": largest}


def main():
    seed, steps = map(int, sys.argv[1:])
    found = {
        "one": trained(lambda model: torch.amp.GradScaler("cpu"), seed, steps),
        "auto": trained(lambda model: LayerwiseGradScaler(model, "auto"), seed, steps),
    }
    with tempfile.TemporaryDirectory() as folder:
        threads = torch.get_num_threads()
        run = look(Path(folder) / "run", "digits-deep", steps=steps, seed=seed, threads=threads)
    names = "diagnosis", "proposal", "phases", "answer"
    found["inspect"] = {name: run.summary.to_dict()[name] for name in names}
    found["kernels"] = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
