"""The trials of a study: what they cost, what they need, and how long they take side by side.

This module and all that analyses results import no torch.
"""

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key

# Of the budget: the machine is never quite free, and the report also takes time.
SHARE = 0.85
Job = Mapping[str, Any]
"""Work for a worker as plain values: the kind of its result, its key fields, and parameters."""


@dataclass(frozen=True)
class Trial:
    """One piece of work.

    Attributes:
        key: Unique in its study.
        cost: Samples of work that the plan reckons with.
        job: From the results to what is to be done; None where nothing is. It may read only what
            the trials in ``needs`` gave.
        what: Name in messages.
        needs: Keys of the trials that must be done before.
    """

    key: Key
    cost: int
    job: Callable[[Results], Job | None]
    what: str = ""
    needs: tuple[Key, ...] = ()

    def called(self, job: Job) -> str:
        """The name of a job in messages."""
        return self.what + (f", repeat {job['repeat']}" if "repeat" in job else "")


def seed_for(seed: int, *names: object) -> int:
    """A seed for one trial: the same on every machine, unrelated to its neighbours'."""
    text = "/".join(str(name) for name in ("steadygrad", seed, *names))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def evaluation_cost(samples: int) -> int:
    """Samples of work in an evaluation: a forward pass is about a third of training."""
    return math.ceil(samples / 3)


def start_up(workers: int) -> float:
    """Seconds for loading torch and the data, for starting workers, and for the report."""
    return 12.0 if workers > 1 else 4.0


def tails(trials: Sequence[Trial]) -> dict[Key, int]:
    """Cost of the longest chain that each trial begins, itself included, in samples."""
    costs = {trial.key: trial.cost for trial in trials}
    found = dict(costs)
    for trial in reversed(trials):
        for key in trial.needs:
            found[key] = max(found[key], costs[key] + found[trial.key])
    return found


def makespan(trials: Sequence[Trial], workers: int) -> int:
    """Time until all trials are done with ``workers``, in samples of work.

    A free worker takes the ready trial that begins the longest chain.
    """
    chains = tails(trials)
    waiting = sorted(trials, key=lambda trial: -chains[trial.key])
    place = {trial.key: number for number, trial in enumerate(waiting)}
    missing = [len({*trial.needs}) for trial in waiting]
    after: list[list[int]] = [[] for _ in waiting]
    for number, trial in enumerate(waiting):
        for key in {*trial.needs}:
            after[place[key]].append(number)
    ready = [number for number, count in enumerate(missing) if not count]
    ends: list[tuple[int, int]] = []  # of running trials
    now = 0
    while ready or ends:
        while ready and len(ends) < workers:
            number = heappop(ready)
            heappush(ends, (now + waiting[number].cost, number))
        now = ends[0][0]
        while ends and ends[0][0] == now:
            for number in after[heappop(ends)[1]]:
                missing[number] -= 1
                if not missing[number]:
                    heappush(ready, number)
    return now
