"""Cost of layer-wise scaling in a training step, beside torch's GradScaler in the same run.

Arithmetic is float32: on a CPU float16 is several times slower, which would flatter the ratio. The
boundaries, the unscaling and the update do the same work in both. float32 gradients are not counted
in measured steps, so one table is under autocast to float16: it compares a measured step with
another. fairscale's class is timed
where it can be imported: `pip install --no-deps fairscale`, or its source on PYTHONPATH. It is
right on neither model's topology by construction; only the time is compared.

Run: python benchmarks/scaler_overhead.py [--rounds 40] [--threads 2] [--save]
"""

import argparse
import copy
import datetime
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from side_by_side import hardware, measure, save, table
from torch import Tensor, nn

from steadygrad.scale import AutoScale, LayerwiseGradScaler
from steadygrad.tasks import load_task

Make = Callable[[nn.Module], Any]


class Step:
    """One training step of a copy of the model under a scaler."""

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module], Tensor], make: Make) -> None:
        self.model, self.loss = copy.deepcopy(model), loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = make(self.model)
        self.original = hasattr(self.scaler, "get_layer_info")

    def __call__(self) -> None:
        self.optimizer.zero_grad()
        if self.original:
            self.scaler.scale()
            self.loss(self.model).backward()
            self.scaler.unscale()
            self.scaler.step(self.optimizer)
            return
        self.scaler.scale(self.loss(self.model)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def ours(scales: Any, **options: Any) -> Make:
    return lambda model: LayerwiseGradScaler(model, scales, init_scale=2.0**10, **options)


def theirs(pattern: str) -> dict[str, Make]:
    try:
        from fairscale.optim.layerwise_gradient_scaler import LayerwiseGradientScaler
    except ImportError as error:
        print(f"fairscale is left out: {error}")
        return {}

    def make(model: nn.Module) -> Any:
        names = [name for name, _ in model.named_modules() if name.startswith(pattern)]
        return LayerwiseGradientScaler(model, {name: 2.0**4 for name in names if "." not in name})

    return {"fairscale's LayerwiseGradientScaler": make}


def language_model(batch_size: int, half: bool = False) -> dict[str, Step]:
    """The built-in transformer, by scaler; ``half``: under autocast to float16."""
    task = load_task("char-lm")
    model = task.make_model()
    batch = task.train.batch(torch.arange(batch_size))
    variants: dict[str, Make] = {
        "torch GradScaler": lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**10),
        "no layers": ours({}),
        "2 blocks": ours({"blocks.*": 2.0**4}),
        "auto, 6 parts": ours("auto"),
        "auto, every step measured": ours(AutoScale(every=1)),
    }

    def loss(model: nn.Module) -> Tensor:
        with torch.autocast("cpu", torch.float16, enabled=half):
            return task.per_sample_loss(model, batch).mean()

    return {name: Step(model, loss, make) for name, make in variants.items()}


def deep_mlp() -> dict[str, Step]:
    """24 blocks in a row, each chosen."""
    model = nn.Sequential(
        *(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(24)), nn.Identity()
    )
    x = torch.randn(128, 256)
    variants: dict[str, Make] = {
        "torch GradScaler": lambda model: torch.amp.GradScaler("cpu", init_scale=2.0**10),
        "24 blocks": ours({"[0-9]*": 2.0**4}),
        **theirs(""),
    }
    loss = lambda model: F.mse_loss(model(x), x)
    return {name: Step(model, loss, make) for name, make in variants.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    parts = {f"language model, batch of {n}": language_model(n) for n in (8, 32)}
    parts["language model in float16, batch of 8"] = language_model(8, half=True)
    parts["MLP of 24 blocks"] = deep_mlp()
    # Past the automatic scales' beginning, in which every step is measured.
    text = [table(measure(p, rounds=args.rounds, warmup=30), t) for t, p in parts.items()]
    date = datetime.date.today().isoformat()
    report = "\n\n".join([f"# Layer-wise scaler: cost of a step, {date}", f"{hardware()}.", *text])
    print(report)
    if args.save:
        print(save("scaler-overhead-cpu", report + "\n", date))


if __name__ == "__main__":
    main()
