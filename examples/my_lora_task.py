"""LoRA: ``steadygrad advise examples/my_lora_task.py:make_task``; run by itself it measures noise.

A small network learns one function, is frozen, and learns another one by adapters of rank 2 alone.
The adapter is written out here; with peft it is ``get_peft_model(model, LoraConfig(...))``.
"""

import copy
from functools import cache

import torch
from torch import Tensor, nn

from steadygrad import NoiseScale
from steadygrad.tasks import Task, TensorSamples


class LoRALinear(nn.Module):
    """A frozen linear layer, and beside it a trainable product of two narrow matrices."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float = 4.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))
        self.scale = alpha / rank

    def forward(self, x: Tensor) -> Tensor:
        """The base's output, and the adapter's."""
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T * self.scale


def make_data(count: int, seed: int, shift: float) -> TensorSamples:
    """Features with shape (count, 16), and targets that differ between the two tasks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 16, generator=generator)
    y = torch.sin(x @ torch.linspace(-1, 1, 16) + shift).unsqueeze(1)
    return TensorSamples((x, y + 0.3 * torch.randn(count, 1, generator=generator)))


@cache
def pretrained() -> nn.Module:
    """The base model: trained on the first task, once."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    x, y = make_data(1024, seed=0, shift=0.0).batch(torch.arange(1024))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(200):
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def make_model() -> nn.Module:
    """A copy of the base with new adapters: these are what a study trains."""
    model = copy.deepcopy(pretrained())
    model[0], model[2] = LoRALinear(model[0], rank=2), LoRALinear(model[2], rank=2)
    return model


def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """One squared error for each sample, with shape (n,)."""
    x, y = batch
    return (model(x) - y).square().mean(dim=1)


def make_optimizer(parameters: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Of the adapters alone."""
    return torch.optim.AdamW([p for p in parameters if p.requires_grad], lr=lr, weight_decay=0.0)


def make_task() -> Task:
    """The task; steadygrad calls this function."""
    return Task(
        name="lora-regression",
        sample="row",
        make_model=make_model,
        train=make_data(8192, seed=1, shift=0.8),
        valid=make_data(1024, seed=2, shift=0.8),
        per_sample_loss=losses,
        make_optimizer=make_optimizer,
        lr=1e-2,  # for batches of 8; the search begins there
        batch_size=8,
    )


def main(steps: int = 200, micro_batches: int = 4) -> None:
    """Trains the adapters, and measures the noise of their gradients."""
    torch.manual_seed(0)
    task, model = make_task(), make_model()
    optimizer = make_optimizer([*model.parameters()], lr=1e-2)
    noise = NoiseScale(model, samples=8, groups=lambda name: name.rpartition(".")[2])
    for step in range(1, steps + 1):
        for _ in range(micro_batches):
            batch = task.train.batch(torch.randint(8192, (8,)))
            (losses(model, batch).mean() / micro_batches).backward()
        noise.step()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            found = noise.estimate()
            parts = {name: round(group.value.item()) for name, group in found.by_group.items()}
            print(
                f"step {step}  noise scale {found.value.item():.0f} "
                f"[{found.low.item():.0f}, {found.high.item():.0f}]  by matrix {parts}"
            )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    print(f"{trained} of {sum(p.numel() for p in model.parameters())} weights are trained")


if __name__ == "__main__":
    main()
