"""Where float16 gradients underflow or overflow, layer by layer, and which scales would mend it.

The parts: ``settings``; ``plan`` (phases of training and their parts); ``scalers`` (who scales in
each phase); ``units`` (the work, in a fixed order); ``tally`` (counts of exponents in a record);
``verdict`` (pure arithmetic on what was counted: who is at fault, and which scales to take);
``words`` and ``summary`` (what is said about it) and ``run`` (all together).
"""

from steadygrad.studies.inspect.run import inspect, resume
from steadygrad.studies.inspect.settings import Settings, read_settings
from steadygrad.studies.session import Failed, Monitor, Outcome
from steadygrad.studies.stop import Halt, Stop

__all__ = [
    "Failed",
    "Halt",
    "Monitor",
    "Outcome",
    "Settings",
    "Stop",
    "inspect",
    "read_settings",
    "resume",
]
