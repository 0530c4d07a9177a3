"""A study that the command line has never heard of: its settings alone make the command."""

import json
import sys
from dataclasses import dataclass
from functools import cached_property
from types import ModuleType
from typing import Annotated, Literal

import msgspec
import pytest
from msgspec import Meta

from steadygrad.cli import main
from steadygrad.studies.folder import read_run
from steadygrad.studies.schema import STUDIES, CommonSettings, Header, Result, Summary, Table
from steadygrad.studies.study import Study
from steadygrad.studies.trials import Trial
from tests.unit.cli.conftest import PLAIN
from tests.unit.cli.quick import tiny


@dataclass(frozen=True, kw_only=True)
class TallySettings(CommonSettings):
    """Settings of ``steadygrad tally``."""

    rounds: Annotated[int, Meta(ge=1, le=50, description="Rounds: 100% of the work.")] = 3
    shape_of_it: Annotated[Literal["flat", "tall"], Meta(description="Shape.")] = "flat"
    with_luck: Annotated[bool, Meta(description="Hope.")] = False
    share: float = 0.5


class TallyPlan(msgspec.Struct, frozen=True, kw_only=True):
    rounds: int


class TallyHeader(Header, frozen=True, kw_only=True):
    settings: TallySettings
    plan: TallyPlan


class Round(Result, frozen=True, tag="round"):
    key_fields = ("number",)

    number: int
    weights: int


class TallySummary(Summary, frozen=True, kw_only=True):
    rounds: int


class Tally(Study):
    name = "tally"
    dtype = "float32"

    @classmethod
    def make_plan(cls, settings, trainer, *, speed, workers):
        return TallyPlan(rounds=settings.rounds)

    @cached_property
    def keys(self):
        return [("round", number) for number in range(self.plan.rounds)]

    def trials(self):
        jobs = ({"kind": name, "number": number} for name, number in self.keys)
        return [
            Trial(key, 1, lambda journal, job=job: job)
            for key, job in zip(self.keys, jobs, strict=True)
        ]

    def run(self, job, place):
        weights = sum(p.numel() for p in place.trainer.model.parameters())
        return Round(number=job["number"], weights=weights)

    def milestones(self):
        return {"the last round": self.keys[-1]}

    def summarize(self, journal, status):
        rounds = journal.select(Round)
        table = Table("Rounds", ("rounds",), ((str(len(rounds)),),)) if len(rounds) > 2 else None
        return TallySummary(
            schema=3, study="tally", status=status, task="tiny", sample="row", remarks=(),
            answer=f"{len(rounds)} rounds of {rounds[0].weights}.", table=table,
            rounds=len(rounds),
        )  # fmt: skip


@pytest.fixture(autouse=True)
def tally(monkeypatch):
    """Puts the study where every study is found."""

    def module(name, **members):
        found = ModuleType(name)
        vars(found).update(members)
        monkeypatch.setitem(sys.modules, name, found)

    module(
        "steadygrad.studies.tally.schema",
        Header=TallyHeader,
        RESULTS=Round,
        Settings=TallySettings,
        check=lambda header, result: None,
    )
    module("steadygrad.studies.tally")
    module("steadygrad.studies.tally.study", STUDY=Tally)
    monkeypatch.setattr("steadygrad.studies.page.render", lambda run: "<html></html>")
    monkeypatch.setitem(STUDIES, "tally", "How many rounds there are.")


def test_its_help(capsys):
    assert main(["tally", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "How many rounds there are." in out
    assert "--rounds INT Rounds: 100% of the work. (default: 3)" in out
    assert "--shape-of-it flat|tall Shape. (default: flat)" in out
    assert "--with-luck Hope. --share NUMBER" in out
    assert "steadygrad tally --resume runs/mine" in out
    assert "documentation: docs/tally.md" in out


def test_it_is_a_command(refused, capsys):
    assert main(["--help"]) == 0
    assert "tally How many rounds there are." in " ".join(capsys.readouterr().out.split())
    assert (
        "inspect, tally, report, tasks, init or doctor. Found 'taly'. Remedy: steadygrad tally"
        in refused("taly")
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rounds", "51"], "--rounds: Expected `int` <= 50. Found '51'."),
        (["--shape-of-it", "round"], "--shape-of-it: invalid choice: 'round'"),
        (["--share", "half"], "Found 'half'."),
        (["--with-look"], "Found '--with-look'. Remedy: --with-luck, or steadygrad tally --help."),
    ],
)
def test_its_values_are_checked(words, message, refused):
    assert message in refused("tally", *words, "--out", "run")


def test_it_runs_and_goes_on(tmp_path, capsys):
    folder = tmp_path / "run"
    arguments = ["tally", tiny(), *PLAIN, "--rounds=4", "--with-luck", "--out", str(folder)]
    assert main(arguments) == 0
    out, _ = capsys.readouterr()
    assert out.startswith("4 rounds of 161.\n")
    assert "│      4 │" in out
    assert out.endswith(f"\n\nReport: {folder / 'report.html'}\n")
    run = read_run(folder)
    assert (run.header.settings.rounds, run.header.settings.with_luck) == (4, True)
    assert [event.number for event in run.select(Round)] == [0, 1, 2, 3]
    assert main(["tally", "--resume", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 4
    assert main(["tally", "--resume", str(folder), "--rounds", "5"]) == 2
    assert "takes rounds = 4 from the record. Found 5" in capsys.readouterr().err


def test_a_study_without_a_table(tmp_path, capsys):
    arguments = ["tally", tiny(), *PLAIN, "--rounds", "2", "--out", str(tmp_path / "run")]
    assert main(arguments) == 0
    assert capsys.readouterr().out.startswith("2 rounds of 161.\n")
