"""Holds `steadygrad advise` against `steadygrad compare`, which tunes each batch size by itself.

`compare` trains the task's own optimizer from scratch at every batch size, over the length of run
that `advise` speaks of, each with its own searched learning rate, and judges on fresh seeds. A
batch size is good when it needs at most 20 % more samples than the task's own for the same loss.
`advise` is right when its recommendation lies within a factor of two of the largest good one.

Run: python benchmarks/advise_vs_sweep.py [--task char-lm] [--budget 5m] [--sweep 2h] [--save]
"""

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from side_by_side import hardware, save

HEAD = "| batch | best lr | interior | more samples than the first | 95% interval |"


def study(name: str, task: str, *options: str) -> dict[str, Any]:
    """Runs a command as a user would, and returns its summary."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "steadygrad", name, task, *options]
        command += ["--out", str(Path(folder) / "run"), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        found: dict[str, Any] = json.loads(done.stdout)
        return found


def report(advice: dict[str, Any], swept: dict[str, Any], first: int, called: str) -> str:
    """The table, and whether the recommendation holds."""
    own = next((row for row in swept["critical"] if row["optimizer"] == "task"), None)
    if own is None:
        return "The sweep was cut short: no batch size is known to be good."
    lines = [HEAD, "| --- " * 5 + "|"]
    for multiple, extra in own["overheads"].items():
        tuned = next(
            row
            for row in swept["tuned"]
            if (row["optimizer"], row["multiple"]) == ("task", int(multiple))
        )
        # Infinite numbers are text in JSON.
        low, high = map(float, own["intervals"][multiple])
        interior = "yes" if tuned["interior"] else "no"
        lines.append(
            f"| {first * int(multiple)} | {tuned['lr']:.2e} | {interior} "
            f"| {float(extra):+.1%} | {low:+.1%} to {high:+.1%} |"
        )
    good, size = own["within"], advice["recommendation"]["batch_size"]
    lines += ["", f"Largest batch with at most 20% more samples: **{good}**."]
    if size is None:
        return "\n".join([*lines, f"{called} recommends no batch size."])
    verdict = "within" if 0.5 <= size / good <= 2 else "NOT within"
    return "\n".join(
        [
            *lines,
            f"{called} recommends **{size}** ({advice['recommendation']['basis']}),",
            f"{size / good:g} times the sweep's, {verdict} a factor of two.",
            *(f"- {line}" for line in (advice["answer"], *advice["remarks"])),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="char-lm")
    parser.add_argument("--budget", default="5m")
    parser.add_argument("--sweep", default="2h", help="budget of the sweep")
    parser.add_argument("--batches", default="1,2,4,8,16,32,64")
    parser.add_argument("--workers", default="auto")
    parser.add_argument("--summary", help="a summary.json, instead of running advise")
    parser.add_argument("--swept", help="compare's summary.json, instead of running it")
    parser.add_argument("--samples", type=int, help="length of run; default: what advise says")
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()

    from steadygrad.tasks import load_task

    kept = [
        path and json.loads(Path(path).read_text()) for path in (options.summary, options.swept)
    ]
    advice = kept[0] or study("advise", options.task, "--budget", options.budget)
    length = options.samples or advice["recommendation"]["samples"]
    if not length:
        parser.error("advise recommends nothing, and so no length of run: give --samples")
    chosen = ["--optimizers", "task", "--batches", options.batches, "--samples", str(length)]
    chosen += ["--budget", options.sweep, "--workers", options.workers]
    swept = kept[1] or study("compare", options.task, *chosen)
    today = datetime.date.today().isoformat()
    called = f"`steadygrad advise {options.task} --budget {options.budget}`"
    text = f"# Advice against a sweep: {options.task}, {today}\n\n{hardware()}.\n\n"
    text += report(advice, swept, load_task(options.task).batch_size, called) + "\n"
    print(text)
    if options.save:
        print(save(f"advise-vs-sweep-{options.task}", text, today))


if __name__ == "__main__":
    main()
