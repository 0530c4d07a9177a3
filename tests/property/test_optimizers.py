"""Random lives of the optimizers: a minute of CPU time.

`make fuzz` runs as many steps as are asked for.
"""

from collections import Counter

import pytest

from tests.property.fuzz import live
from tests.property.machine import MODES, OPTIMIZERS, STATES


@pytest.mark.few(3)
@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
@pytest.mark.filterwarnings("ignore:Expected finite gradients")
@pytest.mark.filterwarnings("ignore:Expected a parameter sharded once")
@pytest.mark.parametrize("states", STATES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_the_equations(name, mode, states):
    place = [*OPTIMIZERS].index(name) * len(MODES) + [*MODES].index(mode)
    counts, events = Counter(), ("skipped steps", "loads", "casts", "copies")

    def enough():
        coded = counts["codes"] > 1_000 or states != "8bit"
        return counts["steps"] > 120 and coded and all(counts[event] for event in events)

    # What a seed draws depends on the modules that are loaded: until each event was seen.
    for more in range(12):
        if not enough():
            counts += live(name, mode, states, lives=4, seed=100 + place + 1000 * more, stretch=2)
    assert enough()
    assert (counts["codes"] > 1_000) is (states == "8bit")
