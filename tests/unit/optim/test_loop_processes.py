"""Compiled loops among threads and forks, and where they cannot be kept or made."""

import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from steadygrad import optim
from steadygrad.optim import LANS, ScaledAdam, loops
from steadygrad.optim.loops import numbers
from tests.contracts.problems import assert_same, run, threads

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
of_forks = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def trained(make, **mode):
    """Large enough for several threads."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(n, generator=draw).requires_grad_() for n in (150_000, 7, 70_000)]
    optimizer = make(params, **mode)
    run(optimizer, params, range(4), none=False)
    return [p.detach() for p in params]


@threads(2)
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
@threads(2)
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


STEP = """
import torch
from steadygrad.optim import LANS
p = torch.ones(5, requires_grad=True)
optimizer = LANS([p], fused=True)
p.grad = torch.ones(5)
optimizer.step()
assert optimizer._built[0].tables
print(float(p.detach()[0]))
"""


def number_from(script, **environment):
    """What another process prints, and what it says besides."""
    command = [sys.executable, "-c", script]
    there = {**os.environ, **environment}
    done = subprocess.run(command, env=there, capture_output=True, text=True)
    return float(done.stdout), done.stderr


@pytest.mark.slow
def test_a_cache_folder_that_cannot_be_written():
    # Where root cannot write either.
    weight, said = number_from(STEP, NUMBA_CACHE_DIR="/proc/none", OMP_NUM_THREADS="1")
    assert weight < 1
    assert said == ""


@pytest.mark.slow
def test_a_changed_rule_is_compiled_anew(tmp_path):
    """The loops of waves call the rule's own function, which lies in another file than theirs."""
    copy = tmp_path / "steadygrad"
    shutil.copytree(Path(optim.__file__).parents[1], copy, ignore=shutil.ignore_patterns("*cache*"))
    folders = {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "loops")}
    rule = copy / "optim" / "layerwise_rule.py"
    (weight, _), text = number_from(STEP, **folders), rule.read_text()
    assert text.count("    share = lr if") == 1
    rule.write_text(text.replace("    share = lr if", "    lr = lr + lr\n    share = lr if"))
    # Twice the learning rate, in float32.
    assert 1 - number_from(STEP, **folders)[0] == pytest.approx(2 * (1 - weight), rel=1e-3)


def test_loops_are_made_anew_where_any_of_their_parts_changes():
    """The number that every kernel holds on to knows all files that compiled code is made of."""
    place, known = Path(numbers.__file__).parent, {*map(Path.resolve, numbers.SOURCES)}
    # The functions of `passes` are but names of those that compiled code has in their place.
    known.add(place.parent / "passes.py")
    for name in ("layerwise", "scaled_adam", "numbers", "codes"):
        text = (place / f"{name}.py").read_text()
        parts = re.findall(r"from steadygrad\.(optim\S*) import (.*)", text)
        assert parts
        for part, names in parts:
            whole = place.parents[1] / part.replace(".", "/")
            files = [whole / one for one in names.split(", ")] if whole.is_dir() else [whole]
            assert {file.with_suffix(".py") for file in files} <= known


@pytest.mark.slow
def test_numba_is_loaded_with_the_first_step_alone():
    """But what remembers the process is there from the start: a step may come after a fork."""
    loaded = "[n in sys.modules for n in ('numba', 'steadygrad.optim.loops')]"
    script = f"import sys, steadygrad.optim; print(float({loaded} == [False, True]))"
    assert number_from(script)[0] == 1


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
