"""`make bench` runs every benchmark there is."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_that_can_be_saved_are_in_the_makefile():
    scripts = {p.name for p in (ROOT / "benchmarks").glob("*.py") if '"--save"' in p.read_text()}
    run = set(re.findall(r"/python benchmarks/(\w+\.py)", (ROOT / "Makefile").read_text()))
    assert len(scripts) > 5
    assert run == scripts
