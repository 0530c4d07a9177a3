"""FSDP2 with weights, gradients and optimizer states on the host, and a step by fused loops there.

On GPUs: ``torchrun --nproc-per-node 8 cpu_offload.py``. Without torchrun it is one process.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from steadygrad import NoiseScale
from steadygrad.optim import LANS

MICRO_BATCHES, SAMPLES = 4, 8


def main(steps: int = 40) -> None:
    """Trains a small regression on as many processes as torchrun started."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The sums of an offloaded step lie on the host: gloo adds them up over the processes.
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, **alone)
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 1))
    policy = CPUOffloadPolicy(pin_memory=device == "cuda")
    for layer in (model[0], model[2], model):
        fully_shard(layer, offload_policy=policy)
    optimizer = LANS(model.parameters(), lr=5e-3, fused=True)  # Numba's loops, on the host
    noise = NoiseScale(model, samples=SAMPLES)

    torch.manual_seed(1 + dist.get_rank())
    for step in range(1, steps + 1):
        for _ in range(MICRO_BATCHES):
            x = torch.randn(SAMPLES, 32, device=device)
            error = model(x) - x.sum(1, keepdim=True) / 8 + torch.randn(SAMPLES, 1, device=device)
            (error.square().mean() / MICRO_BATCHES).backward()
        noise.step()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            state = optimizer.state[model[0].weight]["exp_avg"]
            value = noise.estimate().value.item()
            print(f"step {step}  noise scale {value:5.1f}  states on {state.device}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
