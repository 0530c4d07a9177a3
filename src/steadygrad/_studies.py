"""The list of all studies. It loads nothing, so that ``steadygrad --help`` needs no extra."""

from importlib import import_module
from types import ModuleType

# Name and question of each study. A study named x is the command `steadygrad x`, and the folder
# ``studies/x``.
STUDIES = {
    "advise": "Which batch size to train at: measured by training, with the noise scale beside it.",
    "compare": "Whether another optimizer is worth it, tuned alike and judged on fresh seeds.",
    "inspect": "Where float16 gradients underflow or overflow, and which loss scales prevent it.",
    "ab": "Whether a change is real: two tasks or two commands on paired seeds.",
}


def module_of(study: str, name: str) -> ModuleType:
    """A module of a study, loaded when it is needed: no study loads another one's.

    These modules do not import the shared code that looks them up here:

    - ``schema``: ``Settings``, ``EXAMPLE``, ``Header``, ``Summary`` and ``RESULTS``
    - ``trials``: ``TRIALS``, a function ``(plan, place, *key, **given) -> Result`` for each kind;
      ``plan_for(settings, trainer, *, speed, workers)`` and ``trials_of(header, results)``; perhaps
      ``TRAINING``, options of the trainer that no setting names, and ``load(settings, files)``
      where the settings do not name one task
    - ``findings``: ``summarize(header, results, status)``, a pure function
    - ``words``: perhaps ``too_little(summary)``, why there is no result at all, or None
    - ``page``: ``view(run, summary)``, the charts and tables of the template ``page.html``
    """
    return import_module(f"steadygrad.studies.{study}.{name}")
