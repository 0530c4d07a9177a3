"""``steadygrad compare`` of AdamW with itself, and with one that leaves out every fourth step.

    python benchmarks/compare_itself.py --save

Whole studies of two tasks. No verdict on AdamW itself is right; the other one has three quarters of
the steps, and should be called worse.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
from collections import Counter
from datetime import date
from pathlib import Path

import torch
from side_by_side import hardware, save

SAMPLES = {"digits-classifier": 1920, "digits-autoencoder": 3840}
STUDIES = {"itself": 30, "lazy": 10}
PAIRS = 24


def itself(model, lr):
    return torch.optim.AdamW(model.parameters(), lr)


class Lazy(torch.optim.AdamW):
    """Leaves out every fourth step."""

    count = 0

    def step(self, closure=None):
        self.count += 1
        return super().step(closure) if self.count % 4 else None


def lazy(model, lr):
    return Lazy(model.parameters(), lr)


def study(job: tuple[str, str, int, Path]) -> tuple[str, str, str, int]:
    """The verdict of a study, and its pairs."""
    task, other, seed, runs = job
    out = runs / f"{task}-{other}-{seed}"
    if not (out / "summary.json").exists():
        words = [sys.executable, "-m", "steadygrad", "compare", task, "--optimizers", "adamw"]
        words += ["--add", f"{Path(__file__).resolve()}:{other}", "--seed", str(seed)]
        words += ["--samples", str(SAMPLES[task]), "--seeds", str(PAIRS), "--budget", "2h"]
        words += ["--workers", "1", "--threads", "1", "--out", str(out)]
        subprocess.run(words, capture_output=True, check=True)
    findings = json.loads((out / "summary.json").read_text())["findings"]
    (row,) = (found for found in findings if found["kind"] == "verdict")
    return task, other, row["verdict"], row["pairs"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=Path, default=Path("runs/compare-itself"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    jobs = [
        (task, other, seed, options.runs)
        for other, count in STUDIES.items()
        for seed in range(count)
        for task in SAMPLES
    ]
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        found = pool.map(study, jobs, chunksize=1)
    rows = ["| task | AdamW against | studies | verdicts | mean pairs |", "| --- " * 5 + "|"]
    for task in SAMPLES:
        for other in STUDIES:
            own = [row for row in found if row[:2] == (task, other)]
            said = ", ".join(
                f"{what} {n}" for what, n in sorted(Counter(r[2] for r in own).items())
            )
            pairs = sum(row[3] for row in own) / len(own)
            rows.append(f"| {task} | {other} | {len(own)} | {said} | {pairs:.1f} |")
    words = [
        "# compare, of AdamW with itself and with one that leaves out every fourth step",
        f"`python benchmarks/compare_itself.py --save`; {hardware()}.",
        f"At most {PAIRS} pairs; trainings over {SAMPLES} samples.",
        "\n".join(rows),
    ]
    text = "\n\n".join(words) + "\n"
    print(text)
    if options.save:
        save("compare-itself", text, date.today().isoformat())


if __name__ == "__main__":
    main()
