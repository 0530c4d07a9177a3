"""Which batch size: the noise scale, and the critical batch size measured by branched training.

The parts, each by itself: ``plan`` (how much of everything fits a budget), ``order`` (seeds and
data orders), ``engine`` (one training loop), ``units`` (the pieces of work, in a fixed order),
``ledger`` (which of them are recorded), ``critical``, ``spread``, ``surface`` and ``recommend``
(pure arithmetic on what was measured), ``summary`` and ``words`` (what is said about it) and
``run`` (all together).
"""

from steadygrad.studies.advise.plan import Plan, Point, make_plan, parse_budget
from steadygrad.studies.advise.run import Failed, Monitor, Outcome, advise, resume
from steadygrad.studies.advise.settings import Settings, read_settings
from steadygrad.studies.stop import Halt, Stop

__all__ = [
    "Failed",
    "Halt",
    "Monitor",
    "Outcome",
    "Plan",
    "Point",
    "Settings",
    "Stop",
    "advise",
    "make_plan",
    "parse_budget",
    "read_settings",
    "resume",
]
