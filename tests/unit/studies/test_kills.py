"""Studies that are killed at random moments and resumed end in the same bytes.

``STEADYGRAD_KILLS=20 pytest -m slow tests/unit/studies/test_kills.py`` kills each one 20 times.
"""

import os
import random
import re
import signal
import sys
import time
from contextlib import suppress

import pytest

from tests.unit.cli.quick import STUDIES, program, run_program, tiny
from tests.unit.studies.framework import copy, recorded, timeless, wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="there are no groups of processes"),
]
KILLS = int(os.environ.get("STEADYGRAD_KILLS", "2"))


def group_is_gone(number):
    with suppress(ProcessLookupError):
        os.killpg(number, 0)
        return False
    return True


def begin(folder, moment, *arguments):
    """Starts the program, and kills it at so many results or seconds, whichever are there first."""
    results, seconds, more, alone = moment
    process = program(*arguments, module="steadygrad", start_new_session=True)
    end = time.monotonic() + seconds
    while recorded(folder) < results and time.monotonic() < end and process.poll() is None:
        time.sleep(0.002)
    time.sleep(more)
    with suppress(ProcessLookupError):
        process.kill() if alone else os.killpg(process.pid, signal.SIGKILL)
    _, err = process.communicate()
    assert process.returncode in (-signal.SIGKILL, 0), err
    assert "Traceback" not in err
    return process.pid


@pytest.fixture(scope="module", params=STUDIES)
def study(request, tmp_path_factory):
    """A study's name, a run of it that was killed early on, and the same run gone on to its end."""
    folder = tmp_path_factory.mktemp(request.param) / "run"
    fixed = ["--device", "cpu", "--threads", "1", "--workers", "2", "--out", str(folder)]
    begin(folder, (1, 100.0, 0.0, False), request.param, tiny(), *STUDIES[request.param], *fixed)
    whole = copy(folder, folder.with_name("whole"))
    finish(request.param, whole, 1)
    return request.param, folder, whole


def finish(name, folder, workers):
    code, _, err = run_program(
        name, "--resume", str(folder), "--workers", str(workers), module="steadygrad"
    )
    assert code == 0, err
    # No result was unreadable, nor came again with other numbers.
    assert not re.search("cannot be read|differ", err), err


def contents(folder):
    """The bytes of all that a complete run consists of, but for the times of its results."""
    files = (path for path in folder.iterdir() if path.is_file())
    return timeless(folder) | {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments_and_resumed_to_the_same_bytes(study, workers, tmp_path):
    """Each time the whole group of processes, or the coordinator without its workers."""
    name, base, whole = study
    folder, groups = copy(base, tmp_path / "run"), []
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for left in range(KILLS, 0, -1):
        now = recorded(folder)
        most = max(1, 2 * (recorded(whole) - now) // left)
        # Half of them perhaps while it starts; then in mid-trial.
        seconds = moments.choice([100.0, 6.0 * moments.random()])
        more = 0.1 * moments.random()
        moment = now + moments.randint(1, most), seconds, more, moments.random() < 0.5
        arguments = [name, "--resume", str(folder), "--workers", str(workers)]
        groups.append(begin(folder, moment, *arguments))
        print(f"{moment}: {now} to {recorded(folder)} of {recorded(whole)} results")
    finish(name, folder, workers)
    assert contents(folder) == contents(whole)
    assert not (folder / "checkpoints").exists()
    for group in groups:
        wait_for(lambda group=group: group_is_gone(group), 20)
