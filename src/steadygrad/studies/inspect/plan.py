"""From a time budget to a number of steps, and the list of trials, by arithmetic alone.

A part is an eighth of a phase of training, and starts from the state after the part before it. The
phases that use one loss scale and that find scales do not need each other. The phase that tries
the proposed scales needs both: the proposal is arithmetic on what they recorded.
"""

from functools import partial
from typing import Any

from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.analysis import by_phase, propose
from steadygrad.studies.inspect.schema import AFTER, BEFORE, PARTS, PHASES, SEARCH, TITLES, Plan
from steadygrad.studies.schema import Key
from steadygrad.studies.trials import SHARE, Job, Trial, evaluation_cost, makespan, start_up

# Time of a step over that of the steps whose speed was measured: those that overflow are repeated.
REPEATED = 1.2


def make_plan(
    settings: schema.Settings, plan: Plan, valid_size: int, *, speed: float, workers: int
) -> Plan:
    """The steps that the settings name; without a number as many as the budget has time for.

    ``plan`` tells batch size and layers; ``speed`` is that of one trial, in samples a second.
    """
    span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed / REPEATED
    fewer = range(schema.STEPS, schema.LEAST_STEPS - 1, -PARTS)
    for steps in [settings.steps] if settings.steps else fewer:
        plan = replace(plan, steps=steps)
        trials = make_trials(plan, valid_size)
        if makespan(trials, workers) <= span:
            break
    return replace(plan, work=sum(trial.cost for trial in trials))


def make_trials(plan: Plan, valid_size: int) -> list[Trial]:
    """All trials, in the order in which they are recorded; one evaluates ``valid_size`` samples."""
    found: list[Trial] = []
    measured = tuple(("part", phase, part) for phase in (BEFORE, SEARCH) for part in range(PARTS))
    for phase in PHASES:
        first: tuple[Key, ...] = measured if phase == AFTER else ()
        needs = first
        for part in range(PARTS):
            key: Key = ("part", phase, part)
            start, stop = steps_of(plan, part)
            cost = (stop - start) * plan.batch_size
            found.append(Trial(key, cost, partial(_job, key), TITLES[phase], needs))
            needs = (*first, key)
        if phase != SEARCH:
            key, cost = ("phase", phase), evaluation_cost(valid_size)
            what = f"evaluating {TITLES[phase]}"
            found.append(Trial(key, cost, partial(_job, key), what, needs))
    return found


def steps_of(plan: Plan, part: int) -> tuple[int, int]:
    """First step of a part, and the step after its last one."""
    return plan.steps * part // PARTS, plan.steps * (part + 1) // PARTS


def _job(key: Key, results: Results) -> Job:
    job: dict[str, Any] = dict(zip(("kind", "phase", "part"), key, strict=False))
    if job["phase"] == AFTER:
        found = propose(by_phase(results))
        job |= {"loss_scale": found.loss_scale, "layer_scales": found.layer_scales}
    return job
