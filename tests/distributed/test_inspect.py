"""``inspect`` on two processes, as ``torchrun`` starts them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from steadygrad.studies.folder import read_run
from tests.unit.studies.framework import lines
from tests.unit.studies.inspect.runs import parts_of

ROOT = Path(__file__).parents[2]
STUDY = """
import sys
from pathlib import Path
import torch
from tests.unit.studies.framework import go_on
from tests.unit.studies.inspect.runs import look, spec
torch.set_num_threads(1)
folder, factory, at = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
if at == "resume":
    go_on(folder)
else:
    look(folder, spec(factory), steps=32, at=int(at))
"""

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def on_two(folder, factory, at):
    """Starts a study, which ends after so many samples, or resumes one."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", STUDY, str(folder), factory, str(at)],
            cwd=ROOT,
            env={
                **os.environ, **shared, "MASTER_PORT": port, "RANK": str(rank),
                "LOCAL_RANK": str(rank),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    said = [process.communicate(timeout=400) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], said
    return read_run(folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return on_two(tmp_path_factory.mktemp("whole") / "run", "residual", 1 << 40)


def test_an_overflow_on_one_process_is_attributed_on_all(whole):
    assert whole.header.runtime.world_size == 2
    found = whole.summary["diagnosis"]["nonfinite_at_any_scale"]
    assert list(found) == ["blocks.1"]
    after = parts_of(whole.folder, "after")
    skipped = sum(part.skipped for part in after)
    assert found == {"blocks.1": skipped}
    # Both processes' gradients are counted, and of each only finite steps.
    counts = [part.weights["last"] for part in after if "last" in part.weights]
    total = sum(h.zero + sum(h.counts) for h in counts)
    assert total == 2 * 17 * (32 - skipped)


def test_all_processes_train_a_lost_part_again(whole, tmp_path):
    run = on_two(tmp_path / "run", "residual", 3 * 32 * 4)
    assert run.summary["status"] == "budget"
    path = max((run.folder / "checkpoints").glob("after-*.pt"))
    path.write_bytes(b"")
    assert on_two(tmp_path / "run", "residual", "resume").summary == whole.summary
    assert lines(run.folder) == lines(whole.folder)
