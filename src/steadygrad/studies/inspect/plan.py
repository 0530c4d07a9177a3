"""From a time budget to a number of steps, by arithmetic alone, and the next trials.

A part is an eighth of a phase of training, and starts from the state after the part before it. The
phases that use one loss scale and that find scales do not need each other. The phase that tries
the proposed scales needs both: the proposal is arithmetic on what they recorded.
"""

from collections.abc import Iterator

from msgspec.structs import replace

from steadygrad.studies.folder import Results
from steadygrad.studies.inspect import schema
from steadygrad.studies.inspect.analysis import by_phase, propose
from steadygrad.studies.inspect.schema import (
    AFTER,
    BEFORE,
    PARTS,
    PHASES,
    SEARCH,
    TITLES,
    Part,
    Phase,
    Plan,
)
from steadygrad.studies.trials import SHARE, Trial, evaluation_cost, start_up

# Time of a step over that of the steps whose speed was measured: those that overflow are repeated.
REPEATED = 1.2


def make_plan(
    settings: schema.Settings, plan: Plan, valid_size: int, *, speed: float, workers: int
) -> Plan:
    """The steps that the settings name; without a number as many as the budget has time for.

    ``plan`` tells batch size and layers; ``speed`` is that of one trial, in samples a second.
    """
    span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed / REPEATED
    # Two phases can go side by side.
    chain = len(PHASES) - (workers > 1)
    fitting = int((span - 2 * evaluation_cost(valid_size)) / chain / plan.batch_size)
    most = min(schema.STEPS, fitting // PARTS * PARTS)
    steps = settings.steps or max(schema.LEAST_STEPS, most)
    work = len(PHASES) * steps * plan.batch_size + 2 * evaluation_cost(valid_size)
    return replace(plan, steps=steps, work=work)


def next_trials(plan: Plan, valid_size: int, results: Results) -> Iterator[Trial]:
    """The next part of each phase that can go on, or the evaluation at its end."""
    yield from _next(plan, valid_size, results, BEFORE)
    yield from _next(plan, valid_size, results, SEARCH)
    if all(results.get(Part, phase, PARTS - 1) for phase in (BEFORE, SEARCH)):
        yield from _next(plan, valid_size, results, AFTER)


def _next(plan: Plan, valid_size: int, results: Results, phase: str) -> Iterator[Trial]:
    given: dict[str, object] = {}
    if phase == AFTER:
        found = propose(by_phase(results))
        given = {"loss_scale": found.loss_scale, "layer_scales": found.layer_scales}
    missing = (part for part in range(PARTS) if results.get(Part, phase, part) is None)
    part = next(missing, None)
    if part is not None:
        start, stop = steps_of(plan, part)
        cost = (stop - start) * plan.batch_size
        yield Trial(("part", phase, part), cost, TITLES[phase], given)
    elif phase != SEARCH and results.get(Phase, phase) is None:
        cost, what = evaluation_cost(valid_size), f"evaluating {TITLES[phase]}"
        yield Trial(("phase", phase), cost, what, given)


def steps_of(plan: Plan, part: int) -> tuple[int, int]:
    """First step of a part, and the step after its last one."""
    return plan.steps * part // PARTS, plan.steps * (part + 1) // PARTS
