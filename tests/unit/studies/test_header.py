"""The header says what a study ran on."""

from types import SimpleNamespace

import pytest
import torch

from steadygrad.studies.calibration import calibrate
from steadygrad.studies.deadline import Deadline
from steadygrad.studies.distributed import DistributedContext
from steadygrad.studies.environment import environment
from steadygrad.studies.folder import read_run
from steadygrad.studies.header import describe_task
from steadygrad.studies.schema import Runtime
from steadygrad.studies.trainer import Trainer
from tests.unit.studies.framework import PLAN, begin, make_trainer, tiny
from tests.unit.studies.tiny_task import make_task

GPU = SimpleNamespace(name="X100", total_memory=2**36)


def test_a_gpu_is_named_in_the_header(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: asked.append(d) or GPU)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.version, "hip", None)
    device = torch.device("cuda", 1)
    gpu = {"gpu": "X100", "gpu_memory_bytes": 2**36, "cuda": "12.8"}
    assert environment(device) == environment() | gpu
    assert asked == [device]


def test_the_header_says_what_was_run(tmp_path):
    begin(tmp_path / "run", workers=2, seed=3)
    header = read_run(tmp_path / "run").header
    assert header.environment == environment()
    assert header.task.parameters == 8 * 16 + 16 + 16 + 1
    assert (header.task.spec, header.task.optimizer) == (tiny(), "AdamW")
    assert (header.task.beta2, header.task.weight_decay) == (0.999, 0.01)
    assert header.runtime == Runtime(
        device="cpu",
        dtype="float32",
        world_size=1,
        sharding="none",
        threads=1,
        micro_batch_size=16,  # the largest branch
        workers=2,
    )
    assert (header.settings.seed, header.plan) == (3, PLAN)


def test_parameters_are_those_that_train_each_counted_once():
    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)), torch.nn.Linear(8, 1))
    model[1].weight = model[0].weight
    model[2].bias.requires_grad = False

    def make_optimizer(parameters, lr):
        return torch.optim.Adagrad(parameters, lr=lr, weight_decay=0.5)

    task = make_task(make_model=lambda: model, make_optimizer=make_optimizer)
    found = describe_task(make_trainer(task), "spec")
    # One shared 8 x 8 weight, two biases of 8, one weight of 8; the frozen bias is left out.
    assert found.parameters == 64 + 8 + 8 + 8
    assert (found.beta2, found.weight_decay, found.optimizer) == (None, 0.5, "Adagrad")


# Workers, threads and speed


@pytest.fixture
def machine(monkeypatch):
    """Sets what is measured of a machine with eight cores, and keeps this process's threads."""
    place, before = "steadygrad.studies.calibration.", torch.get_num_threads()
    monkeypatch.setattr(place + "environment", lambda: {"cores": 8, "memory_bytes": 1 << 40})

    def given(speed_of, threads=8):
        monkeypatch.setattr(place + "measured_speed", lambda *_: speed_of(torch.get_num_threads()))
        monkeypatch.setattr(place + "GIVEN_THREADS", threads)

    yield given
    torch.set_num_threads(before)


def test_ranks_keep_the_threads_that_their_launcher_gave_them(monkeypatch, machine):
    context = DistributedContext(Deadline(), size=2)
    monkeypatch.setattr(context, "together", lambda work: work())
    monkeypatch.setattr(context, "wrap", lambda model: model)
    trainer = Trainer(make_task(), seed=0, dtype="float32", context=context)
    machine(lambda threads: 8.0)
    torch.set_num_threads(3)
    assert calibrate(trainer, workers=0, threads=0, budget=1e3)[1] == 1
    assert torch.get_num_threads() == 3
    # Alone, one worker has all cores, and each of two has half of them.
    trainer = make_trainer()
    for workers, threads in ((1, 8), (2, 4)):
        assert calibrate(trainer, workers=workers, threads=0, budget=1e3)[1] == workers
        assert torch.get_num_threads() == threads
    # OMP_NUM_THREADS bounds them, also those of a cluster's workers.
    machine(lambda threads: 8.0, threads=3)
    for workers, cluster, threads in ((1, 0, 3), (4, 0, 2), (0, 2, 3)):
        calibrate(trainer, workers=workers, threads=0, budget=1e3, cluster=cluster)
        assert torch.get_num_threads() == threads
    # Where only the threads are said, so many workers as there are cores for.
    assert calibrate(trainer, workers=0, threads=2, budget=1e3) == (8.0, 4)


@pytest.mark.parametrize(
    ("budget", "speeds", "chosen"),
    [
        # A busy machine: eight threads wait for one another.
        (20.0, {8: 32.0, 1: 6889.0}, (6889.0, 1, 1)),
        (20.0, {8: 100.0, 1: 100.0}, (100.0, 1, 1)),
        (20.0, {8: 400.0, 1: 100.0}, (400.0, 1, 8)),
        (300.0, {8: 32.0, 1: 6889.0}, (6889.0, 8, 1)),
        (300.0, {8: 400.0, 1: 10.0}, (400.0, 1, 8)),
    ],
)
def test_one_thread_is_tried_whatever_the_budget(machine, budget, speeds, chosen):
    machine(speeds.get)
    torch.set_num_threads(8)
    trainer = make_trainer(make_task(samples_per_second=None))
    speed, workers = calibrate(trainer, workers=0, threads=0, budget=budget)
    # Rounded down by a quarter power of two at most.
    assert chosen[0] / 2**0.25 < speed <= 1.001 * chosen[0]
    assert (workers, torch.get_num_threads()) == chosen[1:]


@pytest.mark.parametrize(
    ("figure", "measured", "speed"),
    [
        (200.0, 201.0, 200.0),
        (200.0, 180.0, 2**7.25),
        (None, 9.4, 2**3),
        (None, 9.6, 2**3.25),
        (None, 0.9, 2**-0.25),
    ],
)
def test_a_measured_speed_is_rounded_down_and_a_task_figure_is_kept(
    machine, figure, measured, speed
):
    machine(lambda threads: measured)
    trainer = make_trainer(make_task(samples_per_second=figure))
    found = calibrate(trainer, workers=1, threads=1, budget=1e3)
    assert found == (pytest.approx(speed), 1)
