"""No sentence contradicts a number, in records with losses at random."""

import math
import random
import re

import pytest

from steadygrad.studies.strict_json import dumps
from tests.unit.studies.compare.runs import planned
from tests.unit.studies.compare.test_summary import noisy, summary

NUMBER = r"[-+]?\d[\d.,]*(?:e[-+]?\d+)?"
VERDICT = re.compile(
    rf"^(\w+) is (better|worse) than AdamW over ([\d,]+) rows: loss ({NUMBER}) against "
    rf"({NUMBER}) on (\d+) seeds, difference ({NUMBER}) "
    rf"\(([\d.]+)% interval ({NUMBER}) to ({NUMBER})\)\."
)
UNTOLD = re.compile(
    rf"^(\w+) against AdamW over ([\d,]+) rows: cannot tell after (\d+) seeds, difference "
    rf"({NUMBER}) \(([\d.]+)% interval ({NUMBER}) to ({NUMBER})\); "
)


@pytest.mark.parametrize("seed", range(60))
def test_no_sentence_contradicts_a_number(seed):
    generator = random.Random(seed)
    names = ("lans", "sgd")
    shifts = {n: {s: generator.gauss(0, 0.05) for s in (64, 128)} for n in names}
    curve = noisy(shifts, spread=generator.choice([0.001, 0.03]), fall=generator.choice([0.2, 0]))
    lost = generator.choice([0.0, 0.0, 0.05])

    def loss_of(**fields):
        return math.inf if random.Random(f"{seed}{fields}").random() < lost else curve(**fields)

    part = generator.choice([0.0, 0.0, 0.3])
    found = summary(
        planned(seeds=generator.choice([2, 5, 10])),
        loss_of,
        "complete",
        keep=lambda e: random.Random(f"{seed}{e.key}").random() >= part,
    )
    dumps(found)
    last = {row["optimizer"]: row for row in found["verdicts"]}
    titles = {found["optimizers"][name]: row for name, row in last.items()}
    flipped = {found["optimizers"][flip["optimizer"]] for flip in found["flips"]}
    text = " ".join(found["words"])
    assert "nan" not in text
    for title, row in titles.items():
        (said,) = (w for w in found["words"] if w.startswith((f"{title} is", f"{title} against")))
        ends = row["low"], row["high"]
        losses = [*row["losses"].values(), *row["baseline_losses"].values()]
        if any(map(math.isinf, losses)):
            assert f"diverged on {sum(map(math.isinf, row['losses'].values()))} of" in said
            assert ("cannot tell, as" in said) == (row["verdict"] == "cannot tell")
            continue
        if row["verdict"] == "cannot tell":
            match = UNTOLD.match(said)
            shown = [float(text) for text in match.groups()[3:]]
            assert int(match[3]) == len(row["losses"])
            assert shown[2] <= 0 <= shown[3]
            assert "would need" not in said
            needed = row["needed"]
            more = f"about {needed:,} seeds would" if needed else "even 10,000 seeds would not"
            assert f"; {more} be enough." in said
        else:
            match = VERDICT.match(said)
            own, base, seeds, *shown = (float(text) for text in match.groups()[3:])
            assert seeds == len(row["losses"])
            assert match[2] == row["verdict"] == ("better" if shown[0] < 0 else "worse")
            assert shown[2] * shown[3] >= 0
            assert own - base == pytest.approx(row["mean"], abs=1e-3 * abs(own) + 1e-9)
            ratio = row["sample_ratio"]
            assert ("would need" in said) == (ratio is not None)
            if ratio is not None:
                assert (ratio["low"] > 1) == (row["verdict"] == "better")
                assert (ratio["high"] < 1) == (row["verdict"] == "worse")
        assert shown[0] == pytest.approx(row["mean"], rel=1e-2)
        assert shown[1] == pytest.approx(100 * row["confidence"], rel=1e-2)
        assert shown[2:] == pytest.approx(ends, rel=1e-2)
        assert (title in flipped) == ("The order changes" in text and f": {title} is" in text)
    assert ("diverged" in text) == bool(found["diverged"])
    if found["flips"]:
        assert found["words"][0].startswith("The order changes")
