"""Workers, threads and speed; trials side by side; executors that run them."""

import sys

import msgspec
import pytest
import torch

from steadygrad._checks import InputError
from steadygrad.studies import executors, work
from steadygrad.studies.calibration import calibrate
from steadygrad.studies.distributed import Deadline, DistributedContext
from steadygrad.studies.executors import cuda_devices, made_workers
from steadygrad.studies.folder import read_run
from steadygrad.studies.schema import CommonSettings
from steadygrad.studies.trainer import Trainer
from steadygrad.tasks import TaskError
from tests.refusals import refused
from tests.unit.studies.framework import FILES, begin, go_on, left, make_trainer, part, timeless
from tests.unit.studies.results import make_header
from tests.unit.studies.tiny_task import make_task

# Workers, threads and speed


def calibrated(
    monkeypatch, trainer, speed_of, *, given=8, workers=0, threads=0, budget=1e3, cluster=0
):
    """The speed, the workers and the threads that are chosen on a machine with eight cores."""
    place = "steadygrad.studies.calibration."
    monkeypatch.setattr(place + "cores", lambda: 8)
    monkeypatch.setattr(place + "memory_bytes", lambda: 1 << 40)
    monkeypatch.setattr(place + "measured_speed", lambda *_: speed_of(torch.get_num_threads()))
    monkeypatch.setattr(place + "GIVEN_THREADS", given)
    settings = CommonSettings(workers=workers, threads=threads, budget=budget)
    found = calibrate(trainer, settings, cluster)
    return *found, torch.get_num_threads()


@pytest.mark.parametrize(
    ("options", "speeds", "chosen"),
    [
        # A busy machine: eight threads wait for one another.
        ({"budget": 20.0}, {8: 32.0, 1: 6889.0}, (6889.0, 1, 1)),
        ({"budget": 20.0}, {8: 100.0, 1: 100.0}, (100.0, 1, 1)),
        ({"budget": 300.0}, {8: 32.0, 1: 6889.0}, (6889.0, 8, 1)),
        ({"budget": 300.0}, {8: 400.0, 1: 10.0}, (400.0, 1, 8)),
        # One worker has all cores, and each of two has half of them.
        ({"workers": 1}, {8: 8.0}, (8.0, 1, 8)),
        ({"workers": 2}, {4: 8.0}, (8.0, 2, 4)),
        # OMP_NUM_THREADS bounds them, also those of a cluster's workers.
        ({"workers": 1, "given": 3}, {3: 8.0}, (8.0, 1, 3)),
        ({"workers": 4, "given": 3}, {2: 8.0}, (8.0, 4, 2)),
        ({"cluster": 2, "given": 3}, {3: 8.0}, (8.0, 2, 3)),
        # Where only the threads are said, so many workers as there are cores for.
        ({"threads": 2}, {2: 8.0}, (8.0, 4, 2)),
    ],
)
def test_workers_and_threads(monkeypatch, options, speeds, chosen):
    torch.set_num_threads(8)
    trainer = make_trainer(make_task(samples_per_second=None))
    speed, *found = calibrated(monkeypatch, trainer, speeds.get, **options)
    # Rounded down by a quarter power of two at most.
    assert chosen[0] / 2**0.25 < speed <= 1.001 * chosen[0]
    assert tuple(found) == chosen[1:]


@pytest.mark.parametrize(("cores", "planned", "workers"), [(8, 3, 3), (4, 3, 2), (2, 3, None)])
def test_workers_of_the_plan_have_the_cores_of_this_machine(monkeypatch, cores, planned, workers):
    monkeypatch.setattr(executors, "cores", lambda: cores)
    runtime = msgspec.structs.replace(make_header().runtime, workers=planned, threads=2)
    found = executors.local_workers(0, runtime)
    assert (found and found.count()) == workers


def test_ranks_keep_the_threads_that_their_launcher_gave_them(monkeypatch):
    context = DistributedContext(Deadline(), size=2)
    monkeypatch.setattr(context, "together", lambda work: work())
    monkeypatch.setattr(context, "wrap", lambda model: model)
    trainer = Trainer(make_task(), seed=0, dtype="float32", context=context)
    torch.set_num_threads(3)
    assert calibrated(monkeypatch, trainer, lambda threads: 8.0) == (8.0, 1, 3)


@pytest.mark.parametrize(
    ("figure", "measured", "speed"),
    [
        (200.0, 201.0, 200.0),
        (200.0, 180.0, 2**7.25),
        (None, 9.6, 2**3.25),
        (None, 0.9, 2**-0.25),
    ],
)
def test_a_measured_speed_is_rounded_down_and_a_task_figure_is_kept(
    monkeypatch, figure, measured, speed
):
    trainer = make_trainer(make_task(samples_per_second=figure))
    found = calibrated(monkeypatch, trainer, lambda threads: measured, workers=1, threads=1)
    assert found == (pytest.approx(speed), 1, 1)


# Trials side by side


def test_what_a_task_prints_in_a_worker_is_no_output(tmp_path, monkeypatch, capsys):
    """A thread's, or an executor's whose processes inherit standard output."""
    (tmp_path / "header.json").touch()
    monkeypatch.setattr(work, "_worker", lambda *arguments: None)
    monkeypatch.setattr(work, "work_on", lambda trial, place: print("noise"))
    work.run_trial(str(tmp_path), {}, "{}")
    assert capsys.readouterr() == ("", "noise\n")


def test_a_worker_stops_once_the_file_is_there(tmp_path):
    deadline = Deadline(stop=tmp_path / "stop")
    assert deadline.flags == [0.0, 0.0, 0.0]
    (tmp_path / "stop").touch()
    assert deadline.flags == [0.0, 0.0, 1.0]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, ["0", "1"]),
        ("GPU-8932f937, MIG-1f2c", ["GPU-8932f937", "MIG-1f2c"]),
        ("3,-1,5", ["3"]),
    ],
)
def test_workers_share_the_devices_that_the_launcher_gave(given, expected, monkeypatch):
    """CUDA counts the devices of the list, and those before the first -1 only."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(expected))
    if given is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", given)
    assert cuda_devices() == expected


# Executors of the user's own

POOLS = """
from concurrent.futures import Future, ThreadPoolExecutor


class Own:
    \"\"\"It says nothing of its workers.\"\"\"

    def submit(self, function, *arguments):
        future = Future()
        future.set_result(function(*arguments))
        return future


def threads():
    return ThreadPoolExecutor(3)


def raising():
    raise OSError("no cluster")
"""


@pytest.fixture
def pools(tmp_path, monkeypatch):
    """A file with executors, which is a module as well."""
    (tmp_path / "pools_of_mine.py").write_text(POOLS)
    monkeypatch.syspath_prepend(tmp_path)
    yield f"{tmp_path}/pools_of_mine.py"
    sys.modules.pop("pools_of_mine", None)


@pytest.mark.slow
def test_a_run_goes_on_with_or_without_an_executor(whole, pools, tmp_path):
    folder = tmp_path / "run"
    begin(folder, at=400)
    part(folder, 2000, executor=f"{pools}:threads")
    part(folder, 4000, workers=2, executor="pools_of_mine:Own")
    assert read_run(folder).header.settings.executor == ""
    _, watcher = go_on(folder)
    assert watcher.lines == []
    assert timeless(folder) == timeless(whole)
    assert left(folder) == FILES


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ("{file}:raising", "OSError: no cluster"),
        ("{file}:Own", "--workers"),
        ("pools_of_mine:absent", "absent"),
        ("threads", "threads"),
        ("json:dumps", "TypeError"),
    ],
)
def test_what_makes_no_executor_is_refused(pools, spec, part):
    with refused(part, kind=InputError if part == "--workers" else TaskError):
        made_workers(spec.format(file=pools), 0)
