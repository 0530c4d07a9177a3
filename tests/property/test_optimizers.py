"""Random lives of the optimizers: half a minute of CPU time.

`make fuzz` runs as many steps as are asked for.
"""

import pytest

from tests.property.fuzz import live
from tests.property.machine import MODES, OPTIMIZERS


@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
@pytest.mark.filterwarnings("ignore:Expected finite gradients")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_step_is_the_equations(name, mode):
    place = [*OPTIMIZERS].index(name) * len(MODES) + [*MODES].index(mode)
    counts = live(name, mode, lives=12, seed=place)
    assert counts["steps"] > 120
    assert min(counts[event] for event in ("skipped steps", "loads", "casts", "copies")) > 0
