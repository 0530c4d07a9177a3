"""Device, workers and speed: the only choices of a study that depend on the clock."""

import math
import time
from collections.abc import Callable

import torch

from steadygrad._checks import InputError
from steadygrad.studies.course import Order, Rate
from steadygrad.studies.record import cores, memory_bytes
from steadygrad.studies.schema import CommonSettings
from steadygrad.studies.trainer import Trainer

WARM_UP_STEPS = 4
SECONDS = 0.3
# Some optimizers divide by a rate. A study may search another one than a task's that diverges.
NO_RATE = 1e-9
# Workers pay for their start, and share the memory's bandwidth.
WORTH = 1.3
# Least speed-up for which a trial gets several threads: on a busy machine threads wait for one
# another.
WORTH_THREADS = 1.1
LEAST_BUDGET = 60.0
MOST_WORKERS = 16
# Threads at import, for instance from OMP_NUM_THREADS, before a study changes the number.
GIVEN_THREADS = torch.get_num_threads()
# Memory of a worker beside its model: Python, torch and the data.
WORKER_BYTES = 1 << 30


def resolve_device(name: str) -> torch.device:
    """The device that a setting stands for here: auto prefers CUDA, then the CPU."""
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(name, True):
        raise InputError(f"Expected a device {name}. Found none. Remedy: --device cpu.")
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    return torch.device(name)


def calibrate(trainer: Trainer, settings: CommonSettings, cluster: int = 0) -> tuple[float, int]:
    """Chooses workers and threads, and measures the speed of a trial; sets the threads.

    On a CPU the speed is the task's own figure, unless the machine is slower than that. The trainer
    is freshly started, before and afterwards; ``cluster``: the number of its workers, 0 without.
    Samples a second of one trial are returned, and trials at a time.
    """
    workers = _choose_workers(trainer, settings, cluster)
    measured, figure = measured_speed(trainer, trainer.task.batch_size), None
    if trainer.context.device.type == "cpu":
        figure = trainer.task.samples_per_second
    if figure is not None and measured >= figure:
        return figure, workers
    # Rounded down to a quarter power of two: a slightly busier machine makes the same plan.
    return 2.0 ** (math.floor(4 * math.log2(measured)) / 4), workers


def _choose_workers(trainer: Trainer, settings: CommonSettings, cluster: int) -> int:
    device, alone = trainer.context.device.type, trainer.context.size == 1
    asked = (cluster or settings.workers) if alone else 1
    if device != "cpu":
        return asked or (torch.cuda.device_count() if device == "cuda" else 1)
    threads, most = torch.get_num_threads(), cores()
    if asked or settings.threads:
        if settings.threads:
            threads = settings.threads
        # Ranks have the threads that their launcher gave them: they share the cores.
        elif alone:
            threads = min(GIVEN_THREADS, most if cluster else max(1, most // asked))
        torch.set_num_threads(threads)
        return asked or max(1, most // threads)
    workers = 1
    if settings.budget >= LEAST_BUDGET:
        # They fit into half of the memory.
        memory = memory_bytes() or 4 * WORKER_BYTES
        weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
        fitting = max(1, int(memory // 2 // (WORKER_BYTES + 8 * weights)))
        workers = min(most, MOST_WORKERS, fitting)
    if most == 1 or workers == threads == 1:
        return 1
    whole = measured_speed(trainer, trainer.task.batch_size)
    torch.set_num_threads(1)
    one = measured_speed(trainer, trainer.task.batch_size)
    if workers > 1 and one * workers > WORTH * whole:
        return workers
    if whole > WORTH_THREADS * one:
        torch.set_num_threads(threads)
    return 1


def clock_of(trainer: Trainer) -> Callable[[], float]:
    """Seconds that only ever grow, as this thread works.

    What other programs take from it does not count, so that a busy machine measures the same
    speed. Where others work for it, on an accelerator or in processes, all time counts.
    """
    alone = trainer.context.device.type == "cpu" and not trainer.task.loader_workers
    return time.thread_time if alone else time.monotonic


def measured_speed(trainer: Trainer, size: int, *, few: bool = False) -> float:
    """Samples a second at a batch size, the same on every rank; ``few``: by at least three steps.

    With micro-batches that fit into memory.
    """
    context, data, clock = trainer.context, trainer.task.train, clock_of(trainer)

    def measure() -> float:
        order = Order(len(data), trainer.seed, "speed")
        steps = trainer.run(order, 0, 1 << 40, size, rate=Rate(factor=NO_RATE))
        for _ in range(1 if few else WARM_UP_STEPS):
            next(steps)
        began, seen = clock(), 0
        # Every rank takes part until rank 0 has seen enough.
        while context.gather(clock() - began < SECONDS)[0]:
            for _ in range(2 if few else 4):
                next(steps)
                seen += size
        trainer.look()
        return seen / (clock() - began)

    measured: float = context.gather(trainer.by_halves(measure))[0]
    trainer.restart()
    return measured
