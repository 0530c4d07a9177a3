"""``steadygrad inspect`` on two processes, as ``torchrun`` starts them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from steadygrad.record import read_run
from tests.distributed.test_advise import port

__all__ = ["port"]

TASKS = Path(__file__).parents[1] / "unit" / "studies" / "fp16_task.py"

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_an_overflow_on_one_process_is_attributed_on_all(tmp_path, port):
    command = [sys.executable, "-m", "steadygrad", "inspect", f"{TASKS}:residual", "--steps", "32"]
    command += ["--device", "cpu", "--out", str(tmp_path / "run"), "--budget", "10m"]
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            command,
            env={
                **os.environ, **shared, "MASTER_PORT": str(port), "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    run = read_run(tmp_path / "run")
    assert run.header["settings"]["world_size"] == 2
    assert run.summary is not None
    assert list(run.summary["verdict"]["broken"]) == ["blocks.1"]
    after = [event for event in run.select("part") if event["phase"] == "after"]
    skipped = sum(event["skipped"] for event in after)
    assert run.summary["verdict"]["broken"] == {"blocks.1": skipped}
    # Both processes' gradients are counted, and of each only finite steps.
    counts = [event["weights"]["last"] for event in after]
    total = sum(h["zero"] + sum(h["counts"]) for h in counts)
    assert total == 2 * 17 * (32 - skipped)
