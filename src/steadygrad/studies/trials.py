"""The trials of a study: what they are, what they cost, and their seeds.

This module and all that analyses results import no torch.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steadygrad.studies.schema import Key

# Of the budget: the machine is never quite free, and the report also takes time.
SHARE = 0.85


@dataclass(frozen=True)
class Trial:
    """Work that gives one result.

    Attributes:
        key: Of the result: its kind, and the values of its key fields.
        cost: Samples of work that the plan reckons with.
        what: Name in messages.
        given: What the trial's function takes beside the key fields.
    """

    key: Key
    cost: int
    what: str
    given: Mapping[str, Any] = field(default_factory=dict)


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
