"""Device, workers and speed: the only choices of a study that look at the clock."""

import math
import time
from dataclasses import dataclass
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.record import environment
from steadygrad.studies.order import Order
from steadygrad.studies.trainer import Trainer

__all__ = ["Calibration", "calibrate", "resolve_device"]

WARM_UP_STEPS = 4
SECONDS = 0.3
# Workers pay for their start, and share the memory's bandwidth.
WORTH = 1.3
LEAST_BUDGET = 60.0
MOST_WORKERS = 16
# Memory of a worker beside its model: Python, torch and the data.
WORKER_BYTES = 1 << 30


@dataclass(frozen=True)
class Calibration:
    """Speed and number of workers.

    Attributes:
        speed: Samples a second of one trial.
        workers: Trials at a time.
    """

    speed: float
    workers: int


def resolve_device(name: str) -> torch.device:
    """The device that a setting stands for here.

    Args:
        name: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"mps"``.

    Raises:
        InputError: If the device is not there.
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(name, True):
        raise InputError(
            f"The device {name} should be available. Found none. Remedy: --device cpu."
        )
    if name == "auto":
        name = "cuda" if there["cuda"] else "cpu"
    return torch.device(name)


def calibrate(settings: Any, trainer: Trainer, cluster: int) -> Calibration:
    """Chooses workers and threads, and measures the speed of a trial; sets the threads.

    On a CPU the speed is the task's own figure, unless the machine is slower than that.

    Args:
        settings: The study's settings.
        trainer: Freshly started; it is so again afterwards.
        cluster: Workers of a cluster; 0 for this machine's.
    """
    alone = trainer.context.size == 1
    if trainer.context.device.type != "cpu":
        devices = torch.cuda.device_count() if trainer.context.device.type == "cuda" else 1
        workers = cluster or settings.workers or devices if alone else 1
        return Calibration(_speed(trainer), workers)
    cores = int(environment()["cores"])
    workers = cluster or (settings.workers if alone else 1)
    if workers or settings.threads:
        # Ranks have the threads that their launcher gave them: they share the cores.
        own = max(1, cores // (1 if cluster else workers)) if alone else torch.get_num_threads()
        threads = settings.threads or own
        torch.set_num_threads(threads)
        return Calibration(_speed(trainer), workers or max(1, cores // threads))
    whole = _speed(trainer, said=False)
    if settings.budget < LEAST_BUDGET or cores == 1:
        return Calibration(_speed(trainer), 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    workers = min(cores, MOST_WORKERS, _fitting(trainer))
    if workers > 1 and _speed(trainer, said=False) * workers > WORTH * whole:
        return Calibration(_speed(trainer), workers)
    torch.set_num_threads(threads)
    return Calibration(_speed(trainer), 1)


def _fitting(trainer: Trainer) -> int:
    """Workers that fit into half of the memory."""
    memory = environment()["memory_bytes"] or 4 * WORKER_BYTES
    weights = sum(p.numel() * p.element_size() for p in trainer.model.parameters())
    return max(1, int(memory // 2 // (WORKER_BYTES + 8 * weights)))


def _speed(trainer: Trainer, *, said: bool = True) -> float:
    """Samples a second: the task's own figure, or the measured one where that is lower.

    Args:
        trainer: The trainer.
        said: False: the measured speed itself.
    """
    task, context = trainer.task, trainer.context
    steps = trainer.run(Order(len(task.train), trainer.seed, "speed"), 0, 1 << 40, task.batch_size)
    for _ in range(WARM_UP_STEPS):
        next(steps)
    began, seen = time.monotonic(), 0
    # Every rank takes part until rank 0 has seen enough.
    while context.gather(time.monotonic() - began < SECONDS)[0]:
        for _ in range(4):
            next(steps)
            seen += task.batch_size
    trainer.look()
    measured: float = context.gather(seen / (time.monotonic() - began))[0]
    trainer.restart()
    if not said:
        return measured
    figure = task.samples_per_second if context.device.type == "cpu" else None
    # Rounded down to steps of 2**0.5: a machine a little busier than last time makes the same plan.
    rounded = float(2.0 ** (math.floor(2 * math.log2(measured)) / 2))
    return rounded if figure is None or measured < figure else figure
