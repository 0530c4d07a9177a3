"""Eight processes of one thread step eight shards, on the cores of one process of two threads.

The 23 million parameters of `step_time.py`, sharded along their first dimensions as by FSDP2. Both
take four steps (the eight with sums over shards) in turns, while the others sleep. A process alone
compiles before. An alarm ends each process after 150 seconds.

Run: python benchmarks/eight_processes.py [--rounds 12]
"""

import argparse
import signal
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from side_by_side import hardware, measure
from step_time import MAKERS, SETS, STEPS, parameters
from torch.distributed.tensor import DeviceMesh, Shard, distribute_tensor

WORLD, WARMUP, LIMIT = 8, 1, 150
KEYS = ["torch AdamW(fused=True)"]
KEYS += [f"{name}{bits}(fused=True)" for name in ("LANS", "ScaledAdam") for bits in ("", " 8bit")]


def optimizers(split: Callable[[Any], Any] = lambda tensor: tensor) -> list[torch.optim.Optimizer]:
    params = []
    for p in parameters(SETS["23M"]):
        params.append(torch.nn.Parameter(split(p.detach())))
        params[-1].grad = split(p.grad)
    return [MAKERS[key](params) for key in KEYS]


def take(optimizer: torch.optim.Optimizer) -> None:
    for _ in range(STEPS):
        optimizer.step()


def work(rank: int, world: int, turn: Any, folder: str, turns: int) -> None:
    signal.alarm(LIMIT)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/{world}", rank=rank, world_size=world)
    mesh = DeviceMesh("cpu", range(world))
    for optimizer in optimizers(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)])):
        for _ in range(turns):
            turn.wait()
            take(optimizer)
            turn.wait()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    rounds, context = parser.parse_args().rounds, mp.get_context("spawn")
    signal.alarm(LIMIT)
    torch.set_num_threads(2)
    print(f"{hardware()}.\n\n| 23 M | eight over one | quartiles | one, ms |\n{'| --- ' * 4}|")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (1, context.Barrier(1), folder, 1))
        turn = context.Barrier(WORLD + 1)
        ranks = mp.spawn(work, (WORLD, turn, folder, WARMUP + rounds), WORLD, join=False)
        for key, optimizer in zip(KEYS, optimizers(), strict=True):
            both = {"one": partial(take, optimizer), "eight": lambda: (turn.wait(), turn.wait())}
            one, t = measure(both, rounds=rounds, warmup=WARMUP).values()
            numbers = f"{t.ratio:.2f} | {t.low:.2f}-{t.high:.2f} | {1e3 * one.seconds / STEPS:.1f}"
            print(f"| {key} | {numbers} |", flush=True)
        ranks.join()
