"""`make bench` runs every benchmark there is."""

from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_all_that_can_be_saved_are_in_the_makefile():
    scripts = {p.name for p in (ROOT / "benchmarks").glob("*.py") if '"--save"' in p.read_text()}
    lines = (ROOT / "Makefile").read_text().splitlines()
    run = {
        line.split("benchmarks/")[1].split()[0] for line in lines if "$(BIN)/python bench" in line
    }
    assert len(scripts) > 5
    assert run == scripts
