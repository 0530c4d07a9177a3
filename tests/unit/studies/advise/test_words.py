"""What is said, and that it is said when it is true."""

import math

import pytest

from steadygrad.studies.advise.critical import Critical
from steadygrad.studies.advise.recommend import WholeRun
from steadygrad.studies.advise.surface import Measured
from steadygrad.studies.advise.words import Findings, megatron, sentences

SIZES = (8, 16, 32, 64)
SETTINGS = {"lr": 0.001, "lr_rule": "sqrt", "batch_size": 8, "tolerance": 0.2}
SCHEDULE = [
    {"from_samples": 0, "batch_size": 8, "lr": 0.001},
    {"from_samples": 700, "batch_size": 16, "lr": 0.001 * 2**0.5},
    {"from_samples": 16_000, "batch_size": 32, "lr": 0.002},
]
NOISE = {"value": 120.4, "low": 80.0, "high": 200.0, "resolved": True}


def critical(value=40.0, low=30.0, high=50.0, at_edge="") -> Critical:
    return Critical(SIZES, (0.0, 0.1, 0.15, 0.4), (), value, low, high, at_edge, 1.5, 100, 80, 120)


def findings(**changes) -> Findings:
    run = WholeRun(24_576, 36.0, 28.0, 45.0, 0.06, 32, SIZES, (0.0, 0.05, 0.17, 0.3), 150.0)
    last = Measured(16_384, 8_192, changes.pop("critical", critical()))
    return Findings(**{
        "sample": "sequence",
        "settings": SETTINGS,
        "status": "complete",
        "run": run,
        "last": last,
        "planned": 3,
        "points": 3,
        "noise": NOISE,
        "schedule": SCHEDULE,
        "warmup": 1024,
        **changes,
    })  # fmt: skip


def test_fewer_samples_are_not_a_negative_number_more():
    run = WholeRun(24_576, 36.0, 28.0, 45.0, 0.06, 16, SIZES, (0.0, -0.01, 0.17, 0.3), 150.0)
    assert sentences(findings(run=run))[1] == (
        "Against batches of 8 that is 50% of the steps for 1% fewer sequences."
    )


def test_a_failed_study_is_not_told_to_go_on():
    first = sentences(findings(status="failed", points=1))[0]
    assert first == "The study failed after measuring 1 of 3 points: this is preliminary."
    first = sentences(findings(status="failed", run=None, last=None, points=0))[0]
    assert "the study failed before" in first
    assert "--resume" not in first


def test_a_whole_recommendation():
    assert sentences(findings()) == [
        (
            "Train at a batch of 32 sequences with learning rate 0.002, for a whole run of about "
            "24,576 sequences: up to 36 (95% interval 28 to 45) a batch costs at most 20% more "
            "sequences than 8 does."
        ),
        "Against batches of 8 that is 29% of the steps for 17% more sequences.",
        (
            "From scratch, warm that learning rate up over about the first 1,024 sequences: the "
            "branches began with trained weights, and untrained ones may not bear it at once."
        ),
        (
            "From where the study ended, after 16,384 sequences, go on at 32 with learning rate "
            "0.002: the critical batch size there is 40 sequences (95% interval 30 to 50)."
        ),
        (
            "With a growing batch: start at 8, then 16 from 700, then 32 from 16,000 sequences on "
            "(Megatron: 0:8 700:16 16K:32). It begins with the task's own learning rate and raises "
            "it only with the batch, so it is itself a warm-up."
        ),
        (
            "Trust the critical batch size: it was measured directly, by training on from the same "
            "weights at each batch size, at 3 points of training. The first 6% of the run lie "
            "before that: there it is taken to have grown from nothing, and the interval reaches "
            "up to what holds if it was the same from the start."
        ),
        (
            "The gradient noise scale, 120 sequences (95% interval 80 to 200), is a diagnostic: "
            "it predicts the critical batch size only roughly, and of language models trained "
            "with Adam it is known to underestimate it by orders of magnitude (Merrill et al. "
            "2025)."
        ),
    ]


def said(**changes) -> str:
    return " ".join(sentences(findings(**changes)))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"critical": critical(64.0, 64.0, math.inf, "above")}, "at least 64 sequences, the large"),
        ({"critical": critical(64.0, 9.0, math.inf, "above")}, "likely above 64 sequences"),
        ({"critical": critical(64.0, 9.0, math.inf, "above")}, "(95% interval from 9 on)"),
        ({"critical": critical(64.0, 9.0, math.inf, "above")}, "Its interval is wide"),
        ({"critical": critical(11.0, 8.0, 14.0, "below")}, "even the smallest batch tried may be"),
        ({"critical": critical(40.0, 10.0, math.inf)}, "10 to beyond the largest tried"),
        ({"critical": critical(40.0, 10.0, 60.0)}, "Its interval is wide"),
        ({"noise": {**NOISE, "resolved": False}}, "unresolved: the measurements only say that"),
        ({"points": 1}, "at one point of training. The first 6%"),
        ({"status": "budget", "points": 2}, "ran out of its budget after measuring 2 of 3 points"),
        ({"status": "interrupted"}, "was interrupted after"),
        ({"schedule": SCHEDULE[:2]}, "go on at 16 with learning rate 0.00141"),
        ({"schedule": SCHEDULE[:2]}, "; 16 is what the fit through all points gives there."),
        (
            {"schedule": [SCHEDULE[1] | {"from_samples": 0}, SCHEDULE[2]]},
            "16K:32). Its first learning rate needs the same warm-up.",
        ),
        ({"sample": "entry"}, "32 entries"),
        ({"sample": "batch"}, "32 batches"),
        ({"sample": "day"}, "32 days"),
    ],
)
def test_what_depends_on_the_findings(changes, expected):
    assert expected in said(**changes)
    assert expected not in said()


def test_what_is_not_said():
    assert "Its interval is wide" not in said()
    assert "Megatron" not in said(schedule=[SCHEDULE[2] | {"from_samples": 0}])
    assert "what the fit" not in said()
    constant = [row | {"lr": 0.001} for row in SCHEDULE]
    assert "itself a warm-up" not in said(schedule=constant)
    assert "noise scale" not in said(noise=None)
    assert "From scratch, warm" not in said(warmup=0)


def test_the_smallest_batch_is_the_answer():
    run = WholeRun(24_576, 12.0, 9.0, 15.0, 0.06, 8, SIZES, (0.0, 0.3, 0.6, 1.0), 30.0)
    assert "doubling it would already cost 30% more sequences" in said(run=run)


def test_the_largest_batch_is_no_limit():
    run = WholeRun(24_576, 64.0, 50.0, math.inf, 0.06, 64, SIZES, (0.0, 0.0, 0.0, 0.1), math.inf)
    text = said(run=run)
    assert "every batch size tried stayed within the tolerance" in text
    assert "inf" not in text


def test_no_number_without_a_measurement():
    nothing = {"run": None, "last": None, "schedule": []}
    early = sentences(findings(**nothing, points=0, status="interrupted"))
    assert early[0].startswith("No batch size can be recommended yet: the study was interrupted")
    flat = sentences(findings(**nothing, points=1))
    assert "the validation loss did not fall" in flat[0]
    assert "Try another Task.lr" in flat[0]
    cut = sentences(findings(**nothing, points=1, status="budget"))
    assert "ran out of its budget after measuring 1 of 3 points, where the valid" in cut[0]
    assert "Try another" not in cut[0]
    assert len(early) == len(flat) == 2


def test_megatron():
    rows = [{"from_samples": 0, "batch_size": 16, "lr": 1.0}]
    rows.append({"from_samples": 4000, "batch_size": 32, "lr": 1.5})
    assert megatron(rows) == "0:16 4K:32"


def test_points_that_say_nothing_are_named():
    text = said(unresolved=[20_000, 30_000])
    assert "After 20,000 and 30,000 sequences the critical batch size is unresolved" in text
    assert "From the last point that tells, after 16,384 sequences" in text
    text = said(unresolved=[700])
    assert "After 700 sequences the critical" in text
    assert "From where the study ended, after 16,384" in text
    assert "unresolved" not in said()
