"""One example of each template of words, and the recorded run, word by word."""

import math

import pytest
from msgspec.structs import replace

from steadygrad.studies.compare import words
from steadygrad.studies.compare.findings import find
from steadygrad.studies.compare.schema import Brackets, Edge, Flip, Ratio, Summary
from tests.unit.studies.compare.runs import noisy, planned, summary

STAY = "Stay with AdamW at learning rate 0.001"


@pytest.fixture(scope="module")
def found() -> Summary:
    """LANS and SGD against AdamW, at one batch size."""
    return summary(planned(seeds=5), noisy({}))


@pytest.fixture(scope="module")
def several() -> Summary:
    """The same, at three batch sizes."""
    return summary(planned(seeds=5, multiples=(1, 4, 16)), noisy({}))


def told(s: Summary, **verdicts) -> Summary:
    """The summary with other verdicts, by optimizer or by optimizer and batch size; no edges."""
    rows = []
    for row in s.verdicts:
        size = row.multiple * s.batch_size
        verdict = verdicts.get(f"{row.optimizer}_{size}", verdicts.get(row.optimizer))
        rows.append(replace(row, verdict=verdict or "cannot tell", lr=0.002))
    tuned = tuple(replace(row, interior=True) for row in s.tuned)
    s = replace(s, verdicts=tuple(rows), tuned=tuned, flips=())
    return replace(s, findings=tuple(find(s)))


def test_the_answer_names_what_is_better(found):
    s = told(found, lans="better")
    row = s.verdicts[-2]
    assert words.answer(s) == (
        "LANS (learning rate 0.002) is better than AdamW (0.001) after 128 rows: validation loss "
        f"{row.loss:.4g} against {row.baseline_loss:.4g} on 5 fresh seeds."
    )


def test_the_answer_names_the_batch_sizes(several):
    assert words.answer(told(several, lans_16="better", lans_64="better")) == (
        "LANS (batch size 16 and 64) is better than AdamW after 128 rows."
    )
    assert words.answer(told(several, lans="worse", sgd="worse")) == (
        "Stay with AdamW: it is better than LANS and SGD after 128 rows."
    )


def test_the_answer_without_a_better_one(found):
    nothing = f"{STAY}: no other optimizer is shown to be better after 128 rows."
    assert words.answer(told(found, lans="worse")) == nothing
    both = told(found, lans="worse", sgd="worse")
    assert words.answer(both) == f"{STAY}: it is better than LANS and SGD after 128 rows."
    rows = tuple(replace(row, baseline_lost=2) for row in told(found).verdicts)
    lost = replace(found, verdicts=rows, findings=rows[-2:], flips=())
    assert words.answer(lost) == (
        "AdamW diverged on 2 of 5 seeds, and no other optimizer is shown to be better after 128 "
        "rows."
    )
    assert words.answer(replace(found, findings=(), flips=())) == (
        "No optimizer can be judged yet: a verdict needs two seeds of each."
    )


def test_an_answer_that_hangs_on_a_condition_opens_with_it(found):
    s = told(found, lans="worse", sgd="worse")
    edge = Edge(optimizer="sgd", multiple=1, hangs=True)
    s = replace(s, findings=(edge, *s.findings))
    said = (
        "SGD may be better than shown, as the best learning rate is the last one tried; so far, "
        "stay with AdamW at learning rate 0.001: it is better than LANS and SGD after 128 rows."
    )
    assert words.answer(s) == said
    # The answer has said it.
    assert words.remarks(s) == ()
    cut = replace(s, status="budget")
    assert words.answer(cut) == f"Preliminary: {said}"
    assert words.remarks(cut) == ("The study ran out of its budget; --resume continues it.",)


def test_a_flip_is_the_answer(several):
    flips = tuple(
        Flip(optimizer=name, multiple=4, short="better", long="worse", samples=(64, 128))
        for name in ("lans", "sgd")
    )
    s = told(several, lans="worse", sgd="worse")
    s = replace(s, flips=flips, findings=(*flips, *s.findings))
    said = (
        "The order changes with the length of the training: {} is better than AdamW after 64 rows, "
        "and worse after 128 at batch size 16."
    )
    assert words.answer(s) == said.format("LANS")
    assert words.remarks(s)[0] == said.format("SGD")
    # What is better at both lengths is said as well.
    s = told(several, lans="worse", sgd_4="better")
    s = replace(s, flips=flips[:1], findings=(flips[0], *s.findings))
    assert words.answer(s) == said.format("LANS")
    assert words.remarks(s)[0] == "SGD (batch size 4) is better than AdamW after 128 rows."


CUT = "LANS cannot be told from AdamW on 5 seeds"
STEP = "time: a step takes 1.25 times as long as AdamW's, and the same loss"


def better(samples, time):
    """A verdict with a ratio of samples and of time, each with its interval."""
    return {"verdict": "better", "sample_ratio": Ratio(*samples), "time_ratio": Ratio(*time)}


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"needed": 23}, f"{CUT}; about 23 would tell, if the true difference is −0.02."),
        ({}, f"{CUT}; not even 8,000 would tell, if the true difference is −0.02."),
        (
            {"rates_limit": True},
            (
                f"{CUT}; more seeds would not help, as the difference is within the error of the "
                "tuned learning rates."
            ),
        ),
        ({"lost": 4, "verdict": "worse"}, "LANS diverged on 4 of 5 seeds, AdamW on 0."),
        ({"baseline_lost": 2}, ""),
        ({"verdict": "worse"}, ""),
        (
            better((1.1, 1.05, 4.0), (1.1, 0.3, 1.2)),
            f"LANS saves rows and perhaps {STEP} 1.10 (≤ 0.30 to 1.20) times.",
        ),
        (
            better((1.1, 1.05, 1.2), (1.1, 1.0, 1.2)),
            f"LANS saves rows but no {STEP} 1.10 (1.00 to 1.20) times.",
        ),
        (
            better((1.5, 1.4, 1.6), (0.8, 0.7, 0.9)),
            f"LANS saves rows and {STEP} 0.80 (0.70 to 0.90) times.",
        ),
    ],
)
def test_a_verdict_in_words(found, fields, said):
    plain = {"verdict": "cannot tell", "mean": -0.02, "needed": None, "rates_limit": False}
    row = replace(found.verdicts[-2], **{**plain, **fields})
    assert words.said(row, found) == said


def test_other_findings_in_words(several):
    edge = Edge(optimizer="sgd", multiple=4, hangs=False)
    assert words.said(edge, several) == (
        "The best learning rate of SGD at batch size 16 is the last one tried: a better one may "
        "lie beyond."
    )
    assert words.said(Brackets(sizes={"adamw": (4, 16), "lans": (64, None)}), several) == (
        "Critical batch size (20% more rows than at 4): AdamW 4 to 16 and LANS at least 64."
    )


@pytest.mark.parametrize(
    ("fields", "cell"),
    [
        ({"mean": -0.02, "low": -0.031, "high": -0.009}, "−0.02 (−0.031 to −0.009)"),
        ({"mean": math.inf, "lost": 3}, "diverged on 3 of 5 seeds"),
        ({"mean": math.nan, "baseline_lost": 2}, "AdamW diverged on 2 of 5 seeds"),
    ],
)
def test_a_difference_in_a_table(found, fields, cell):
    assert words.difference(replace(found.verdicts[-2], **fields)) == cell


def test_a_bound_is_said_as_one(found):
    samples, time = Ratio(0.25, 0.25, 0.5), Ratio(5.0, 2.5, 5.0)
    row = replace(found.verdicts[-2], sample_ratio=samples, time_ratio=time)
    assert words.ratios(row) == ("≤ 0.25 (≤ 0.25 to 0.50)", "≥ 5.00 (2.50 to ≥ 5.00)")
    assert words.ratios(replace(row, sample_ratio=None, time_ratio=None)) == ("–", "–")
