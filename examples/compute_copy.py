"""Weights in bf16 on the device; masters, 8-bit moments and the step on the host.

One process, without FSDP. Where there is no CUDA device the CPU is both sides.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from steadygrad.optim import LAMB

SCALE = 2.0**10


@torch.no_grad()
def host_copy(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights once more, on the host: pinned, so that copies run beside the program."""
    return {
        name: nn.Parameter(torch.empty_like(p, device="cpu", pin_memory=p.is_cuda).copy_(p))
        for name, p in model.named_parameters()
    }


@torch.no_grad()
def step_on_host(
    model: nn.Module, host: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer
) -> None:
    """Takes the gradients to the host, steps there, and takes the weights back."""
    for name, p in model.named_parameters():
        host[name].grad = None if p.grad is None else p.grad.to("cpu", non_blocking=True)
        p.grad = None
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # The gradients have arrived, and the last weights have left.
    optimizer.step()
    for name, p in model.named_parameters():
        p.copy_(host[name], non_blocking=True)


def held(name: str, tensors: Iterable[Tensor | None], model: nn.Module) -> str:
    """Bytes of the tensors' storages for each parameter."""
    storages = [t.untyped_storage() for t in tensors if t is not None]
    size = sum({s.data_ptr(): s.nbytes() for s in storages}.values())
    return f"{name} {size / sum(p.numel() for p in model.parameters()):.2f}"


def main(steps: int = 40) -> None:
    """Trains a small regression, and says what lies where."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 1024), nn.Tanh(), nn.Linear(1024, 256), nn.Linear(256, 1))
    model.to(device, torch.bfloat16)
    host = host_copy(model)
    # Clips by the norm of all gradients in the pass that looks for infinities anyway.
    optimizer = LAMB(host.values(), lr=5e-3, max_grad_norm=1.0, state_dtype="8bit")
    for step in range(1, steps + 1):
        x = torch.randn(256, 64, device=device)
        error = model(x.bfloat16()).float() - x.sum(1, keepdim=True) / 8
        loss = error.square().mean()
        (SCALE * loss).backward()
        if step == steps:
            print(f"step {step}  loss {loss.item():.3f}  skipped {int(optimizer.skipped)}")
            weights = held("weights", model.parameters(), model)
            grads = held("gradients", [p.grad for p in model.parameters()], model)
            print(f"bytes a parameter, device: {weights}, {grads}")
        # The scale leaves the gradients as the step reads them. fp16 needs one, bf16 does not.
        optimizer.grad_scale = torch.tensor(SCALE)
        step_on_host(model, host, optimizer)
    weights = held("weights", host.values(), model)
    grads = held("gradients", [p.grad for p in host.values()], model)
    states = [(name, t) for state in optimizer.state.values() for name, t in state.items()]
    masters = held("masters", [t for name, t in states if name == "master_weight"], model)
    moments = held("moments", [t for name, t in states if name != "master_weight"], model)
    print(f"bytes a parameter, host: {weights}, {grads}, {masters}, {moments}")


if __name__ == "__main__":
    main()
