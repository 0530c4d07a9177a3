"""Compiled loops among threads and forks, and where they cannot be kept or made."""

import multiprocessing
import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from steadygrad import kernels
from steadygrad.kernels import threads
from steadygrad.optim import LANS, ScaledAdam

MAKERS = {"lans": LANS, "scaled_adam": lambda p, **k: ScaledAdam(p, clipping_scale=2.0, **k)}
every_optimizer = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)


def trained(make, steps=4, **mode):
    """Large enough for several threads."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw).requires_grad_() for n in (150_000, 7, 70_000)]
    optimizer = make(params, **mode)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=draw)
        optimizer.step()
    return [p.detach() for p in params]


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def same(first, second):
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@every_optimizer
@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_step_at_once(make):
    expected = trained(make, fused=True)
    found = {}

    def work(place):
        found[place] = trained(make, fused=True)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [same(found[i], expected) for i in range(4)] == [True] * 4


def step_in_child(connection, make):
    # Torch's own operations would wait for the parent's threads; only the loops use two.
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: 2
    connection.send((kernels.was_forked(), [p.numpy() for p in trained(make, fused=True)]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_steps_too():
    expected = trained(LANS, fused=True)  # the parent's threads have run
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=step_in_child, args=(theirs, LANS))
    child.start()
    arrived = ours.poll(30)
    forked, found = ours.recv() if arrived else ("it hangs", [])
    child.kill()
    child.join()
    assert forked is True
    assert not kernels.was_forked()
    assert same([torch.from_numpy(x) for x in found], expected)


# The package is loaded before the fork, the loops after it.
FIRST_STEP_IN_CHILD = """
import multiprocessing
import torch
from steadygrad.optim import LANS
torch.set_num_threads(2)
torch.randn(1000, 1000).exp().sum()
p = torch.ones(200_000).requires_grad_()
p.grad = torch.ones(200_000)
optimizer = LANS([p], fused=True)
def child():
    torch.set_num_threads(1)
    torch.get_num_threads = lambda: 2
    optimizer.step()
worker = multiprocessing.get_context("fork").Process(target=child)
worker.start()
worker.join(30)
print(worker.exitcode)
worker.kill()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_the_first_compiled_step_may_come_after_the_fork():
    done = subprocess.run([sys.executable, "-c", FIRST_STEP_IN_CHILD], capture_output=True)
    assert done.stdout.split() == [b"0"]


def step_beside_a_lock(connection):
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    connection.send(([p.numpy() for p in trained(LANS)], kernels.choose_mode("LANS", None, None)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_fork_while_something_is_compiled_goes_by_calls():
    """The thread that compiles is not forked along, and would never open the lock."""
    from steadygrad.kernels import cpu

    expected = trained(LANS, foreach=True)
    ours, theirs = multiprocessing.Pipe()
    with cpu._LOCK:
        child = multiprocessing.get_context("fork").Process(
            target=step_beside_a_lock, args=(theirs,)
        )
        child.start()
    arrived = ours.poll(30)
    found, mode = ours.recv() if arrived else ([], "it hangs")
    child.kill()
    assert mode == "foreach"
    assert same([torch.from_numpy(x) for x in found], expected)


SCRIPT = """
import torch
from steadygrad.optim import LANS
p = torch.ones(5, requires_grad=True)
optimizer = LANS([p], fused=True)
p.grad = torch.ones(5)
optimizer.step()
print(optimizer._plans is not None, float(p.detach()[0]))
"""


def test_a_cache_folder_that_cannot_be_written():
    place = Path("/proc/none")  # where root cannot write either
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True
    )
    assert done.stderr == b""
    assert done.stdout.split()[0] == b"True"
    assert float(done.stdout.split()[1]) < 1


# A damaged file of the cache raises whatever it likes.
@pytest.mark.parametrize(
    "error", [RuntimeError, PermissionError, EOFError], ids=lambda e: e.__name__
)
def test_without_any_folder_it_is_compiled_for_the_process(error, monkeypatch):
    from steadygrad.kernels import cpu, numba_parts

    asked, compiled = [], numba_parts.compiled

    def nowhere(function, cache):
        asked.append(cache)
        if cache:
            raise error("no locator available")
        return compiled(function, cache)

    monkeypatch.setattr(numba_parts, "compiled", nowhere)
    found = cpu._address_of.__wrapped__("lans_norms", (torch.float32,) * 4)
    assert asked == [True, False]
    assert found > 0


def test_nothing_is_loaded_before_it_is_needed():
    script = "import sys, steadygrad.optim; print('numba' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]


@every_optimizer
def test_a_compiler_that_fails_is_left_alone(make, monkeypatch):
    from steadygrad.kernels import cpu

    calls = []

    def fail(name, types):
        calls.append(name)
        raise cpu.NoKernelError("no such processor")

    monkeypatch.setattr(kernels, "_BROKEN", [])
    monkeypatch.setattr(kernels, "_WARNED", set())
    monkeypatch.setattr(cpu, "address_of", fail)
    with pytest.warns(UserWarning, match=r"cannot compile.*no such processor.*Remedy") as caught:
        found = trained(make)
    assert len(caught) == 1
    assert len(calls) == 1
    monkeypatch.undo()
    assert same(found, trained(make, foreach=True))


def test_reasons(monkeypatch):
    import numba

    assert kernels.missing() is None
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert kernels.missing.__wrapped__() == "NUMBA_DISABLE_JIT is set"
    monkeypatch.setitem(sys.modules, "numba", None)
    assert kernels.missing.__wrapped__() == "numba is not installed"


def test_what_is_no_fault_of_the_compiler_is_raised():
    p = torch.ones(3).requires_grad_()
    optimizer = LANS([p], fused=True)
    p.grad = torch.ones(3)
    del optimizer.state[p]["exp_avg"]
    with pytest.raises(KeyError, match="exp_avg"):
        optimizer.step()
    assert kernels.choose_mode("LANS", None, None) == "fused"


@every_optimizer
def test_without_numba_one_warning_says_what_it_costs(make, monkeypatch):
    monkeypatch.setattr(kernels, "_WARNED", set())
    monkeypatch.setattr(kernels, "missing", lambda: "numba is not installed")
    with pytest.warns(UserWarning, match=r"numba is not installed.*steadygrad\[cpu\]") as caught:
        found = trained(make)
    assert len(caught) == 1
    assert same(found, trained(make, foreach=True))


@pytest.mark.parametrize(("threads_of_torch", "elements"), [(1, 10**6), (2, 10**6), (2, 100)])
def test_loops_run_on_torchs_threads(threads_of_torch, elements, monkeypatch):
    """As many as torch has, its very own; one for little work."""
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_torch)
    monkeypatch.setattr(threads, "_pool", lambda count: pytest.fail("threads of its own"))
    team = threads._team()
    if sys.platform == "linux":
        assert team is not None
    start, end = (lambda *given: asked.append(given[2])), (lambda: asked.append("end"))
    monkeypatch.setattr(threads, "_team", lambda: (start, end))
    monkeypatch.setattr(threads, "_KERNEL", lambda address: lambda place: asked.append("own"))
    threads.run(0, torch.zeros(1).numpy(), elements, lambda: asked.append("meanwhile"))
    team = threads_of_torch == 2 and elements > threads.SMALL
    assert asked == ([2, "meanwhile", "own", "end"] if team else ["meanwhile", "own"])


@pytest.mark.parametrize("how", ["team", "pool"])
def test_all_threads_are_waited_for_where_the_own_one_is_interrupted(how, monkeypatch):
    waited = []

    def kernel(place):
        raise KeyboardInterrupt

    pool = SimpleNamespace(submit=lambda *_: SimpleNamespace(result=lambda: waited.append(1)))
    team = (lambda *given: None), (lambda: waited.append(1))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "_team", lambda: team if how == "team" else None)
    monkeypatch.setattr(threads, "_pool", lambda count: pool)
    monkeypatch.setattr(threads, "_KERNEL", lambda address: kernel)
    with pytest.raises(KeyboardInterrupt):
        threads.run(0, torch.zeros(1).numpy(), 10**6)
    assert waited == [1]


def test_a_team_ends_where_something_raises_meanwhile(monkeypatch):
    asked = []
    start, end = (lambda *given: asked.append("start")), (lambda: asked.append("end"))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(threads, "_team", lambda: (start, end))
    monkeypatch.setattr(threads, "_KERNEL", lambda address: lambda place: asked.append("own"))
    with pytest.raises(ZeroDivisionError):
        threads.run(0, torch.zeros(1).numpy(), 10**6, lambda: 1 / 0)
    assert asked == ["start", "own", "end"]


def test_loops_are_made_anew_where_their_parts_change():
    from zlib import crc32

    from steadygrad.kernels import numba_parts

    place = Path(numba_parts.__file__).parent
    parts = b"".join(part.read_bytes() for part in numba_parts.PARTS)
    assert crc32(parts) == numba_parts.SOURCE
    read = {f"steadygrad.{part.parent.name}.{part.stem}" for part in numba_parts.PARTS}
    for loop in place.glob("numba_*.py"):
        assert set(re.findall(r"from (steadygrad\.[\w.]+) import", loop.read_text())) <= read
    # Those that take a constant from it, as every loop must.
    loops = [name for name in place.glob("numba_*.py") if name.name != "numba_parts.py"]
    assert all("SOURCE" in loop.read_text() for loop in loops)
    # Given `nnan` or `ninf`, what guards against such values may be dropped.
    assert {"reassoc", "contract", "arcp", "nsz", "afn"} == numba_parts.FAST


def test_who_decides():
    assert kernels.choose_mode("X", None, None) == "fused"
    assert kernels.choose_mode("X", None, True) == "fused"
    assert kernels.choose_mode("X", None, False) == "foreach"
    assert kernels.choose_mode("X", True, None) == "foreach"
    assert kernels.choose_mode("X", False, None) == "single"
    assert kernels.choose_mode("X", False, True) == "fused"


@pytest.mark.parametrize("error", [OSError, SystemError, AttributeError])
def test_a_broken_numba_is_none(error, monkeypatch):
    def broken(name):
        raise error("libllvmlite.so cannot be found")

    kernels.missing.cache_clear()
    monkeypatch.setattr(kernels.importlib, "import_module", broken)
    try:
        assert kernels.missing() == "numba cannot be loaded (libllvmlite.so cannot be found)"
    finally:
        kernels.missing.cache_clear()
