"""The trials that depend on results: one decision for all repeats, and the same after a resume."""

import random

import pytest

from steadygrad.studies.advise.analysis import Chooser, Evidence
from steadygrad.studies.advise.plan import make_trials
from steadygrad.studies.folder import Results
from tests.unit.studies.advise.events import (
    branches,
    done,
    law,
    make_header,
    measured,
    point,
    scratch,
    studied,
)

POINTS = (1024, 4096)
HEADER = make_header(POINTS)


@pytest.mark.parametrize("critical", [12.0, 60.0, 100.0, 400.0, 1e5])
def test_a_study_with_all_results_there_decides_as_it_did_before_them(critical):
    events, jobs = studied(HEADER, critical)
    assert {key[0] for key, job in jobs.items() if job} >= {"middle", "baseline", "candidate"}
    again, full = Chooser(HEADER), Results(events)
    assert {t.key: t.job(full) for t in make_trials(HEADER.plan, 64, again)} == jobs


def test_those_decisions_depend_on_what_is_there():
    """A guard on the test above: with all results, the first candidate would be another."""
    events, jobs = studied(HEADER, 100.0)
    sizes = [jobs["candidate", number, 0]["batch_size"] for number in (0, 1)]
    assert sizes[0] < sizes[1]
    assert jobs["schedule", 0] is not None
    assert Evidence(HEADER, Results(events)).next_candidate() != sizes[0]


@pytest.mark.parametrize("name", [("middle", 1), ("baseline",), ("candidate", 0), ("schedule",)])
def test_all_repeats_follow_one_decision(name, monkeypatch):
    """The results of the first repeats are there when the job of the next is asked for."""
    which = "_middle" if name[0] == "middle" else "_run"
    made, method = [], getattr(Chooser, which)

    def counted(*arguments):
        made.append(arguments)
        return method(*arguments)

    monkeypatch.setattr(Chooser, which, counted)
    draw, chooser = random.Random(0), Chooser(HEADER)
    events, jobs = [*measured(HEADER), *(scratch(8, seed, 4096) for seed in (1, 2))], []
    for repeat in range(3):
        jobs.append(chooser((*name, repeat), Results(events)))
        # It costs so much that another decision would be another one.
        events.append(done(jobs[-1], 1.0, draw.gauss(0, 0.001)))
    assert jobs == [{**jobs[0], "repeat": repeat} for repeat in range(3)]
    assert len(made) == 1


def test_a_lost_repeat_is_decided_as_the_others_were():
    events, jobs = studied(HEADER, 100.0)
    kept = [e for e in events if e.key[:4] != ("scratch", "constant", 1, 12)]
    assert len(kept) == len(events) - 1
    found = Chooser(HEADER)(("candidate", 0, 1), Results(kept))
    assert found == jobs["candidate", 0, 1]


def test_a_middle_size_is_trained_where_the_bracket_is_known():
    # 89.6 is the truth.
    job = Chooser(HEADER)(("middle", 1, 2), Results(measured(HEADER)))
    assert job == {"kind": "branch", "point": 1, "repeat": 2, "batch_size": 96}
    every = Results(measured(HEADER, (1e5, 1e5)))
    assert Chooser(HEADER)(("middle", 1, 0), every) is None
    # 96 samples are no whole shares of 64 processes.
    shared = make_header(POINTS, runtime={"world_size": 64})
    assert Chooser(shared)(("middle", 1, 0), Results(measured(HEADER))) is None


def test_other_rates_of_a_decaying_task_are_trained_over_the_advised_length():
    """Not before the branches say it, and over the whole trajectory where nothing decays."""
    header = make_header((1024, 4096), task={"lr_decay": "linear"})
    flat = [point(0, 1024), point(1, 4096, losses=lambda s: law(400))]
    events = [*flat, *(b for i in (0, 1) for b in branches(200, sigma=0.001, seed=i, point=i))]
    trials = {t.key: t for t in make_trials(header.plan, 64, Chooser(header), decays=True)}
    journal = Results(events)
    baseline, rate = (trials[key] for key in (("baseline", 0), ("rate", "2", 0)))
    assert rate.job(Results()) is None
    trials = {t.key: t for t in make_trials(header.plan, 64, Chooser(header), decays=True)}
    job = trials["rate", "2", 0].job(journal)
    assert (job["samples"], job["rate"]) == (1024, 2.0)
    assert trials["baseline", 0].job(journal) == {**job, "rate": 1.0}
    assert baseline.key in rate.needs
    plain = {t.key: t for t in make_trials(HEADER.plan, 64, Chooser(HEADER))}["rate", "2", 0]
    assert plain.job(Results())["samples"] == 4096
    assert plain.needs == ()
