"""From a time budget to a number of steps, by arithmetic alone, and the next trials.

The phases that use one loss scale and that find scales do not need each other. The phase that tries
the proposed scales needs both: the proposal is arithmetic on what they recorded.
"""

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
    Phase,
    Plan,
)
from steadygrad.studies.trials import SHARE, Trial, evaluation_cost, start_up

# Time of a step over that of the steps whose speed was measured: those that overflow are repeated.
REPEATED = 1.2


def make_plan(
    settings: schema.Settings, batch_size: int, valid_size: int, *, speed: float, workers: int
) -> Plan:
    """The steps that the settings name; without a number as many as the budget has time for.

    ``speed`` is that of one trial, in samples a second.
    """
    span = SHARE * max(0.0, settings.budget - start_up(workers)) * speed / REPEATED
    # Two phases can go side by side.
    chain = len(PHASES) - (workers > 1)
    fitting = int((span - 2 * evaluation_cost(valid_size)) / chain / batch_size)
    most = min(schema.STEPS, fitting // PARTS * PARTS)
    steps = settings.steps or max(schema.LEAST_STEPS, most)
    work = len(PHASES) * steps * batch_size + 2 * evaluation_cost(valid_size)
    return Plan(batch_size=batch_size, steps=steps, work=work)


def trials_of(header: schema.Header, results: Results) -> list[Trial]:
    """The phases that can be trained."""
    search = header.plan.steps * header.plan.batch_size
    cost = search + evaluation_cost(header.task.valid_size)
    trials = [
        Trial(("phase", BEFORE), cost, TITLES[BEFORE]),
        Trial(("phase", SEARCH), search, TITLES[SEARCH]),
    ]
    if all(results.get(Phase, phase) for phase in (BEFORE, SEARCH)):
        found = propose(by_phase(results))
        given = {"loss_scale": found.loss_scale, "layer_scales": found.layer_scales}
        trials.append(Trial(("phase", AFTER), cost, TITLES[AFTER], given))
    return trials


def steps_of(plan: Plan, part: int) -> tuple[int, int]:
    """First step of a part, and the step after its last one."""
    return plan.steps * part // PARTS, plan.steps * (part + 1) // PARTS
