"""Decisions between trials: batch sizes and lengths of the adaptive trials of ``advise``."""

import math

from steadygrad.studies.advise.recommend import Evidence
from steadygrad.studies.advise.schema import Branch, Header, Scratch
from steadygrad.studies.advise.trials import Stages, scratch_job
from steadygrad.studies.folder import Results
from steadygrad.studies.schema import Key, Result
from steadygrad.studies.trials import Job

__all__ = ["Chooser"]


class Chooser:
    """Makes the jobs that depend on results; all repeats of a trial follow one decision.

    Each decision is made from what the trials that it needs have recorded, whatever else is
    there already: a resumed study decides as before.

    Args:
        header: The record's.
    """

    def __init__(self, header: Header) -> None:
        self.header, self.plan = header, header.plan
        self._jobs: dict[Key, Job | None] = {}

    def __call__(self, key: Key, results: Results) -> Job | None:
        """The job of a trial; None where there is nothing to do."""
        name, repeat = key[:-1], key[-1]
        if name not in self._jobs:
            self._jobs[name] = getattr(self, f"_{name[0]}")(results, *name[1:])
        found = self._jobs[name]
        return None if found is None else {**found, "repeat": repeat}

    def _middle(self, results: Results, point: int) -> Job | None:
        """A branch in the middle between the largest tolerable size and the next one."""
        ladder = {multiple * self.plan.batch_size for multiple in self.plan.multiples[point]}
        kept = [b for b in results.select(Branch) if b.batch_size in ladder]
        found = Evidence(self.header, Results(kept)).critical(point)
        if found is None or not found.resolved or math.isinf(found.beyond):
            return None
        size, odd = divmod(found.within + int(found.beyond), 2)
        if odd or size % self.header.runtime.world_size or found.beyond != 2 * found.within:
            return None
        return {"kind": "branch", "point": point, "batch_size": size}

    def _baseline(self, results: Results) -> Job | None:
        """The smallest batch, over the run's length."""
        length = Evidence(self.header, results).length
        return scratch_job(((0, self.plan.batch_size),), length) if length else None

    def _rate(self, results: Results, rate: str) -> Job | None:
        """The smallest batch at another learning rate, where there is a run to compare it with."""
        job = self._baseline(results)
        return job and {**job, "rate": float(rate)}

    def _candidate(self, results: Results, number: int) -> Job | None:
        """The next batch size that the evidence suggests."""
        evidence = self._before(results, number)
        size = evidence.next_candidate()
        return None if size is None else _warmed_up(evidence, ((0, size),))

    def _schedule(self, results: Results) -> Job | None:
        """The growing batch, where it takes fewer steps than the recommended one."""
        evidence = self._before(results, self.plan.candidates)
        stages = evidence.schedule
        return _warmed_up(evidence, stages) if stages and evidence.baseline else None

    def _before(self, results: Results, candidates: int) -> Evidence:
        """The evidence without runs from scratch that later trials have recorded."""
        jobs = (self._jobs.get(("candidate", number)) for number in range(candidates))
        sizes = {self.plan.batch_size, *(int(job["batch_size"]) for job in jobs if job)}

        def early(event: Result) -> bool:
            if not isinstance(event, Scratch):
                return True
            return event.purpose == "constant" and event.batch_size in sizes

        return Evidence(self.header, Results(filter(early, results)))


def _warmed_up(evidence: Evidence, stages: Stages) -> Job:
    return scratch_job(stages, evidence.length, warmup_samples=evidence.warmup_samples)
