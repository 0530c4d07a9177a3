"""Compiled loops among threads and forks, and where they cannot be kept or made."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch

from steadygrad import optim
from steadygrad.optim import LANS, ScaledAdam, loops
from steadygrad.optim.layerwise_rule import LANS_PASSES
from steadygrad.optim.loops import numbers, runtime, scaled_adam
from steadygrad.optim.passes import named
from tests.contracts.problems import assert_same

CPU = torch.device("cpu")
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
of_forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


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


@pytest.mark.usefixtures("two_threads")
def test_several_python_threads_step_at_once():
    expected, found = trained(ScaledAdam, fused=True), {}

    def work(place):
        found[place] = trained(ScaledAdam, fused=True)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for place in range(4):
        assert_same(found[place], expected)


def in_a_fork(work):
    """Starts a forked process, and returns what is to be called for what the work found there."""
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: theirs.send(work()))
    child.start()

    def result():
        arrived = ours.poll(30)
        found = ours.recv() if arrived else ("it hangs", [])
        child.kill()
        child.join()
        return found

    return result


@needs_fork
@of_forks
@pytest.mark.usefixtures("two_threads")
def test_a_forked_process_steps_too():
    def work():
        # Torch's own operations would wait for the parent's threads; only the loops use two.
        torch.set_num_threads(1)
        torch.get_num_threads = lambda: 2
        return loops.was_forked(), [p.numpy() for p in trained(LANS, fused=True)]

    expected = trained(LANS, fused=True)  # the parent's threads have run
    forked, found = in_a_fork(work)()
    assert forked is True
    assert not loops.was_forked()
    assert_same(map(torch.from_numpy, found), expected)


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


@pytest.mark.slow
@needs_fork
def test_the_first_compiled_step_may_come_after_the_fork():
    done = subprocess.run([sys.executable, "-c", FIRST_STEP_IN_CHILD], capture_output=True)
    assert done.stdout.split() == [b"0"]


@needs_fork
@of_forks
def test_a_fork_while_something_is_compiled_goes_by_calls():
    """The thread that compiles is not forked along, and would never open the lock."""

    def work():
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        return loops.why_none(CPU), [p.numpy() for p in trained(LANS)]

    expected = trained(LANS, foreach=True)
    with runtime._LOCK:
        result = in_a_fork(work)
    why, found = result()
    assert "forked" in why
    assert_same(map(torch.from_numpy, found), expected)


SCRIPT = """
import torch
from steadygrad.optim import LANS
p = torch.ones(5, requires_grad=True)
optimizer = LANS([p], fused=True)
p.grad = torch.ones(5)
optimizer.step()
print(bool(optimizer._built[0].tables), float(p.detach()[0]))
"""


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written():
    place = Path("/proc/none")  # where root cannot write either
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(place), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT], env=environment, capture_output=True
    )
    assert done.stderr == b""
    assert done.stdout.split()[0] == b"True"
    assert float(done.stdout.split()[1]) < 1


@pytest.mark.slow
def test_a_changed_rule_is_compiled_anew(tmp_path):
    """The loops of waves call the rule's own function, which lies in another file than theirs."""
    copy = tmp_path / "steadygrad"
    shutil.copytree(Path(optim.__file__).parents[1], copy, ignore=shutil.ignore_patterns("*cache*"))
    folders = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "loops")}

    def moved():
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, **folders},
            capture_output=True,
            text=True,
        )
        loops_ran, weight = done.stdout.split()
        assert loops_ran == "True"
        return 1 - float(weight)

    rule, step = copy / "optim" / "layerwise_rule.py", moved()
    text = rule.read_text()
    assert text.count("    share = lr if") == 1
    rule.write_text(text.replace("    share = lr if", "    lr = lr + lr\n    share = lr if"))
    # Twice the learning rate, in float32.
    assert moved() == pytest.approx(2 * step, rel=1e-3)


def test_without_any_folder_it_is_compiled_for_the_process(monkeypatch):
    asked, compiled = [], numbers.compiled

    def nowhere(function, cache):
        asked.append(cache)
        if cache:
            raise EOFError("a damaged file of the cache raises whatever it likes")
        return compiled(function, cache)

    monkeypatch.setattr(numbers, "compiled", nowhere)
    found = runtime._kernel_for.__wrapped__(scaled_adam.sums_kernel, (torch.float32,) * 4, ())
    assert asked == [True, False]
    assert found.address > 0


def test_nothing_is_loaded_before_it_is_needed():
    script = "import sys, steadygrad.optim; print('numba' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "True"]


@pytest.fixture
def fresh(monkeypatch):
    """Nothing is known to be broken, and nobody was warned."""
    monkeypatch.setattr(loops, "BROKEN", {})
    monkeypatch.setattr(loops, "_WARNED", set())


@pytest.mark.usefixtures("fresh")
def test_a_compiler_that_fails_is_left_alone(monkeypatch):
    calls = []

    def fail(one, types):
        calls.append(one)
        raise RuntimeError("no such processor")

    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_kernel_of", fail)
        with pytest.warns(UserWarning, match="no such processor") as caught:
            found = trained(LANS)
    assert len(caught) == len(calls) == 1
    assert_same(found, trained(LANS, foreach=True))


@pytest.mark.usefixtures("fresh")
def test_types_that_cannot_be_compiled_leave_others_alone(monkeypatch):
    """Nor other optimizers, on which nothing is tried in vain."""
    tried, kernel_of = [], runtime._kernel_of

    def fail(one, types):
        if torch.bfloat16 in types:
            tried.append(types)
            raise RuntimeError("no such number")
        return kernel_of(one, types)

    monkeypatch.setattr(runtime, "_kernel_of", fail)
    params = [torch.ones(3, dtype=d).requires_grad_() for d in (torch.bfloat16, torch.float32)]
    optimizer = ScaledAdam(params, fused=True)
    for count in range(3):
        for p in params:
            p.grad = torch.ones_like(p)
        with pytest.warns(match="no such number") if count == 0 else nullcontext():
            optimizer.step()
    assert [len(b.tables) for b in optimizer._built] == [0, 1]
    assert len(tried) == 1
    later = ScaledAdam([torch.ones(3).requires_grad_()], fused=True)
    later.param_groups[0]["params"][0].grad = torch.ones(3)
    later.step()
    assert later._built[0].tables


@pytest.mark.usefixtures("fresh")
def test_a_lack_of_memory_in_the_compiler_is_passed_on(monkeypatch):
    """It says nothing about the compiler: the next step tries again."""

    def fail(make_kernel, types, constants):
        raise MemoryError("no memory left")

    p = torch.ones(3).requires_grad_()
    optimizer, p.grad = LANS([p], fused=True), torch.ones(3)
    with monkeypatch.context() as patch:
        patch.setattr(runtime, "_kernel_for", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert loops.why_none(CPU) is None
    assert torch.equal(p.detach(), torch.ones(3))
    optimizer.step()
    assert optimizer._built[0].tables


@pytest.mark.usefixtures("fresh")
def test_every_reason_is_told_once(monkeypatch):
    """A first warning does not hide the next, of another reason."""
    params = [torch.ones(6, 4)[:, ::2].requires_grad_(), torch.ones(3).requires_grad_()]
    params[0].grad, params[1].grad = torch.ones(6, 2), torch.ones(3)
    with pytest.warns(UserWarning, match="strides"):
        LANS(params, fused=True).step()
    monkeypatch.setattr(loops, "why_none", lambda device: "another reason")
    with pytest.warns(UserWarning, match="another reason") as caught:
        LANS(params, fused=True).step()
    assert len(caught) == 1


def test_reasons(monkeypatch):
    import numba

    def broken(name):
        raise OSError("libllvmlite.so")

    assert loops.why_none(CPU) is None
    missing = loops._why_no_numba.__wrapped__
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in missing()
    monkeypatch.setitem(sys.modules, "numba", None)
    assert "installed" in missing()
    # Broken installations raise all sorts of things.
    monkeypatch.setattr(loops.importlib, "import_module", broken)
    assert "libllvmlite.so" in missing()


@pytest.mark.parametrize(("threads_of_torch", "elements"), [(1, 10**6), (2, 10**6), (2, 100)])
def test_loops_run_on_torchs_threads(threads_of_torch, elements, monkeypatch):
    """As many as torch has, its very own; one for little work."""
    asked = []
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_torch)
    team = runtime._team()
    if sys.platform == "linux":
        assert team is not None
    start, end = (lambda *given: asked.append(given[2])), (lambda: asked.append("end"))
    monkeypatch.setattr(runtime, "_team", lambda: (start, end, 1))
    monkeypatch.setattr(runtime, "_KERNEL", lambda address: lambda place: asked.append("own"))
    arguments = np.full(numbers.PLACES, 7)
    runtime._run(0, arguments, runtime._threads(elements))
    team = threads_of_torch == 2 and elements > runtime._SMALL
    assert asked == ([2, "own", "end"] if team else ["own"])
    # A thread alone has nobody to give way to.
    assert arguments[numbers.YIELD] == (1 if team else 0)


def test_all_threads_are_waited_for_where_the_own_one_is_interrupted(monkeypatch):
    waited = []

    def kernel(place):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(runtime, "_team", lambda: (lambda *_: None, lambda: waited.append(1), 1))
    monkeypatch.setattr(runtime, "_KERNEL", lambda address: kernel)
    with pytest.raises(KeyboardInterrupt):
        runtime._run(0, np.zeros(numbers.PLACES, int), 10**6)
    assert waited == [1]


def test_loops_are_made_anew_where_their_parts_change():
    """Every kernel holds on to a number of what loops are made of."""
    place = Path(numbers.__file__).parent
    modules = [path for path in place.glob("*.py") if "def kernel(" in path.read_text()]
    assert sorted(path.stem for path in modules) == ["layerwise", "scaled_adam"]
    types = numbers.kinds_of(*[np.float32] * 4)
    own = {one.loop: one for one in (*LANS_PASSES, *ScaledAdam._passes)}
    assert len(own) == sum(path.read_text().count("def kernel(") for path in modules)
    for one in own.values():
        assert types in [cell.cell_contents for cell in named(one.loop)(types).__closure__]
    # Of anything else that compiled code is made of the number would know nothing.
    known = {*map(Path.resolve, numbers.SOURCES)}
    for path in {*modules, *(path for path in known if path.parent == place)}:
        parts = re.findall(r"from steadygrad\.optim\.(\S+) import", path.read_text())
        files = {place.parent / f"{part.replace('.', '/')}.py" for part in parts}
        # Whose functions are but names of those that compiled code has in their place.
        assert files - {place.parent / "passes.py"} <= known
    # Given `nnan` or `ninf`, what guards against such values may be dropped.
    assert {"reassoc", "contract", "arcp", "nsz", "afn"} == numbers.FAST


@pytest.mark.parametrize(
    ("foreach", "fused", "found"),
    [
        (None, None, "loops"),
        (None, False, "foreach"),
        (True, None, "foreach"),
        (False, None, "single"),
        (False, True, "loops"),
    ],
)
def test_who_decides(foreach, fused, found):
    params = [torch.ones(3).requires_grad_() for _ in range(2)]
    optimizer = LANS(params, foreach=foreach, fused=fused)
    for p in params:
        p.grad = torch.ones(3)
    optimizer.step()
    (batch,) = optimizer._built
    calls = {1: "foreach", 2: "single"}
    assert found == ("loops" if batch.tables else calls[len(batch._bucketed)])
