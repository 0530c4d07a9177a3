"""Whether ScaledAdam and LANS train better than AdamW: `steadygrad compare` with fixed options.

Run: python benchmarks/optimizers_train.py [--task char-lm] [--budget 2h] [--batches 1] [--save]
    [--run FOLDER]  a run that was made before, or that goes on
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from textwrap import fill

from side_by_side import hardware, save

VERDICTS = "| optimizer | batch | seeds | loss | minus AdamW's | AdamW's samples | verdict |"
TUNED = "| optimizer | batch | rate | interior |"


def compare(options: argparse.Namespace, out: Path) -> dict:
    """Runs the command as a user would, and returns its summary."""
    command = [sys.executable, "-m", "steadygrad", "compare", "--json", "--budget", options.budget]
    if options.run:
        command += ["--resume", options.run]
    else:
        for name in ("optimizers", "batches", "workers"):
            command += [f"--{name}", getattr(options, name)]
        command += ["--threads", "1", "--out", str(out), options.task]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


def report(summary: dict, title: str) -> str:
    """The verdicts in words, and as tables."""
    names = summary["optimizers"]
    verdicts = [VERDICTS, "| --- " * 7 + "|"]
    rows = [row for row in summary["findings"] if row["kind"] == "verdict"]
    for row in sorted(rows, key=lambda row: row["arm"]):
        ratio = row["sample_ratio"]
        saved = ratio and f"{ratio['value']:.2f} ({ratio['low']:.2f} to {ratio['high']:.2f})"
        apart = f"{_number(row['mean'])} ({_number(row['low'])} to {_number(row['high'])})"
        verdicts.append(
            f"| {names[row['optimizer']]} | {row['batch_size']} | {row['pairs']} "
            f"| {_number(fmean(map(float, row['losses'].values())))} | {apart} "
            f"| {saved or '-'} | {row['verdict']} |"
        )
    tuned = [TUNED, "| --- " * 4 + "|"]
    for row in summary["tuned"]:
        tuned.append(
            f"| {names[row['optimizer']]} | {row['batch_size']} | {row['lr']:.3g} "
            f"| {'yes' if row['interior'] else 'no'} |"
        )
    said = (summary["answer"], *summary["remarks"])
    words = [fill(f"- {text}", 100, subsequent_indent="  ") for text in said]
    parts = [title, f"{hardware()}.", "\n".join(words), "\n".join(verdicts), "\n".join(tuned)]
    return "\n\n".join(parts) + "\n"


def _number(value: float | str | None) -> str:
    # Infinite numbers are text in JSON.
    return "-" if value is None else f"{float(value):.4g}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="char-lm")
    parser.add_argument("--budget", default="2h")
    parser.add_argument("--optimizers", default="scaledadam,lans")
    parser.add_argument("--batches", default="1")
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--run")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    today = datetime.date.today().isoformat()
    with tempfile.TemporaryDirectory() as folder:
        summary = compare(options, Path(folder) / "run")
    text = report(summary, f"# Optimizers on {summary['task']}, {options.budget}, {today}")
    print(text)
    if options.save:
        print(save(f"optimizers-train-{summary['task']}", text, today))
