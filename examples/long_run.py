"""Which batch size for a run that is too long to be tried, by shorter ones.

python examples/long_run.py
"""

import tempfile
from pathlib import Path

from my_task import make_task

import steadygrad

with tempfile.TemporaryDirectory() as folder:
    result = steadygrad.advise(
        make_task(),
        samples=1_000_000,  # of the run; they do not fit into the budget
        batch_sizes="16,32,64,128,256",  # that the devices allow
        budget="40s",
        threads=1,
        out=Path(folder, "run"),
        progress=False,
    )

print(result)  # what is safe, what is likely, and what the largest size costs
print("predicted for:", result.summary.growth.samples)
