"""A loop that proposes changes, and keeps those that are real.

It has three proposals; a program that writes its own has the same loop. Each is compared with the
best so far, on seeds that no study before had. `--alpha` is the greatest probability of a wrong
verdict in one study: with a share of it for each proposal, the loop keeps what is no better with
a probability of at most one in twenty.
"""

import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).parent / "ab_script.py"
PROPOSALS = ["--lr 0.01", "--alpha 0.00011", "--lr 0.0001"]
BETTER, NOT_BETTER, CANNOT_TELL = 0, 3, 4

best = shlex.join([sys.executable, str(SCRIPT)]) + " --seed {seed}"
options = ["--metric", r"val_loss=(\S+)", "--smallest-effect", "0.02", "--pairs", "20"]
options += ["--alpha", str(0.05 / len(PROPOSALS)), "--quiet"]
for number, proposal in enumerate(PROPOSALS):
    changed = f"{best} {proposal}"
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "steadygrad", "ab", *options, "--out", f"{folder}/run"]
        command += ["--seed", str(1000 * number), best, changed]
        done = subprocess.run(command, capture_output=True, text=True)
    print(f"{proposal}: {done.stdout.strip()}")
    if done.returncode == BETTER:
        best = changed
    elif done.returncode not in (NOT_BETTER, CANNOT_TELL):
        sys.exit(done.stderr)
print("kept:", best.partition("{seed}")[2].strip() or "nothing")
