"""Which batch size a task should be trained at, from Python.

python examples/advise.py
"""

import tempfile
from pathlib import Path

from my_task import make_task

import steadygrad

with tempfile.TemporaryDirectory() as folder:
    result = steadygrad.advise(
        make_task(),
        samples=2048,  # of the training that the advice is for
        seeds=20,  # or leave it away: as many as the budget allows
        budget="2m",
        threads=1,
        out=Path(folder, "run"),
        progress=False,
    )

print(result)  # the answer in one sentence, its table, remarks
print("status:", result.summary.status)
