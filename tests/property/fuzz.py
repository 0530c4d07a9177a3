"""Random lives of the optimizers until so many steps are judged: ``make fuzz STEPS=1000000``."""

import argparse
import itertools
import multiprocessing
import os
import time
import warnings
from collections import Counter

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis.stateful import run_state_machine_as_test

from tests.property.machine import MODES, OPTIMIZERS, STATES, OptimizerMachine

# In one batch: five thousand steps or so.
LIVES = 30


def live(
    name: str, mode: str, states: str, *, lives: int, seed: int, stretch: int = 1
) -> Counter[str]:
    """Random lives of one optimizer that begin in one mode.

    Args:
        name: Of ``OPTIMIZERS``.
        mode: Of ``MODES``.
        states: Of ``STATES``.
        lives: Their number, of 20 events each.
        seed: The same one gives the same lives.
        stretch: Factor on the numbers of steps between other events.

    Returns:
        How often each kind of event happened.

    Raises:
        AssertionError: If a step was not that of the equations; the life is its cause, and the
            message says how the batch is repeated.
    """
    counts: Counter[str] = Counter()
    fields = {"kind": OPTIMIZERS[name], "mode": mode, "states": states, "counts": counts}
    fields["stretch"] = stretch
    machine = type(f"{name}_{mode}_{states}", (OptimizerMachine,), fields)
    settings = hypothesis.settings(
        max_examples=lives,
        stateful_step_count=20,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        # Shrinking takes minutes, and a life is short as it is.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    try:
        run_state_machine_as_test(hypothesis.seed(seed)(machine), settings=settings)
    except Exception as error:
        raise AssertionError(
            f"Expected the steps of the equations. Found others in {name}, {mode}, {states}, seed "
            f"{seed}. Remedy: look at the life above; to repeat it: python -m tests.property.fuzz "
            f"--only {name},{mode},{states} --seed {seed} --lives {lives} --stretch {stretch} "
            "--steps 1"
        ) from error
    return counts


def _batch(job: tuple[str, str, str, int, int, int]) -> tuple[str, Counter[str]]:
    warnings.filterwarnings("ignore", "Expected a fused kernel for")
    warnings.filterwarnings("ignore", "Expected finite gradients")
    warnings.filterwarnings("ignore", "Expected a parameter sharded once")
    name, mode, states, number, lives, stretch = job
    counts = live(name, mode, states, lives=lives, seed=number, stretch=stretch)
    return f"{name}, {mode}, {states}", counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1000, help="of the first batch of lives")
    parser.add_argument("--lives", type=int, default=LIVES, help="of a batch")
    parser.add_argument("--stretch", type=int, default=16, help="factor on numbers of steps")
    parser.add_argument("--only", default="", help="some of three: lans,fused,8bit")
    parser.add_argument("--processes", type=int, default=multiprocessing.cpu_count())
    asked = parser.parse_args()
    began, total, by_kind = time.monotonic(), Counter[str](), Counter[str]()
    only, number = {*filter(None, asked.only.split(","))}, asked.seed
    kinds = [kind for kind in itertools.product(OPTIMIZERS, MODES, STATES) if only <= {*kind}]
    if not kinds:
        known = ", ".join([*OPTIMIZERS, *MODES, *STATES])
        parser.error(f"--only should be of {known}. Found {asked.only!r}. Remedy: lans,fused,8bit")
    # Lives change the number of threads; idle ones that wait in a loop take half of the time.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Begun anew: compiled loops and their threads do not survive a fork.
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        while total["steps"] < asked.steps:
            own = asked.lives, asked.stretch
            jobs = [(*kind, seed, *own) for seed, kind in enumerate(kinds, number)]
            number += len(jobs)
            for kind, counts in pool.imap_unordered(_batch, jobs):
                by_kind[kind] += counts["steps"]
                total += counts
                minutes = (time.monotonic() - began) / 60
                print(f"{total['steps']:,} steps in {minutes:.0f} min, none wrong", flush=True)
    for what, count in {**dict(sorted(by_kind.items())), **total}.items():
        print(f"{what}: {count:,}")


if __name__ == "__main__":
    main()
