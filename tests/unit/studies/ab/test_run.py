"""Whole studies of commands, functions and tasks."""

import math
import re
import shutil
import signal
from dataclasses import replace

import numpy as np
import pytest
from msgspec import structs

import steadygrad
from steadygrad.cli import main
from steadygrad.studies.ab.schema import Arm, Comparison, Summary
from steadygrad.studies.ab.words import table
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render
from tests.unit.cli.quick import ROOT, program
from tests.unit.studies import tiny_task
from tests.unit.studies.ab import functions
from tests.unit.studies.ab.functions import a, b, moved
from tests.unit.studies.ab.runs import study, values
from tests.unit.studies.framework import alive, recorded, timeless, wait_for
from tests.unit.studies.results import rewrite_header


def failing(*seeds):
    """A function that fails with some seeds."""

    def metric(seed):
        if seed in seeds:
            raise RuntimeError("broke")
        return a(seed)

    return metric


# What is shown


@pytest.mark.parametrize(
    ("baseline", "what", "shown"),
    [
        ("x.py --seed {seed}", "x.py --seed {seed} --lr 0.01", "… --lr 0.01"),
        ("x.py --a 1 --b 2", "x.py --a 2 --b 3", "… --a 2 --b 3"),
        ("x.py --fast --seed {seed}", "x.py --seed {seed}", "without --fast"),
        ("x.py --lr 1", "x.py --lr 1", "the same"),
        ("a.py:f", "b.py:f", "b.py:f"),
    ],
)
def test_what_is_common_is_said_once(baseline, what, shown):
    arms = [
        Arm(name=name, what=text, **dict.fromkeys(Arm.__struct_fields__[2:], 0))
        for name, text in (("A", baseline), ("B", what))
    ]
    found = Comparison(name="B", verdict="cannot tell")
    said = Summary(study="ab", status="", task="", sample="", findings=(found,), arms=tuple(arms))
    assert [row[1] for row in table(said).rows] == [baseline, shown]


ALWAYS = {"budget", "seed", "goal", "smallest effect", "alpha", "pairs", "workers"}
TRAINED = {"task", "device", "dtype", "samples"}


@pytest.mark.parametrize(
    ("settings", "samples", "world", "acting"),
    [
        ({"metric": "loss", "dask": "a:1"}, 0, 2, {"metric", "timeout", "dask"}),
        ({"executor": "a:b"}, 640, 2, {"threads", "sharding", "executor", *TRAINED}),
    ],
)
def test_settings_that_act_are_listed(settings, samples, world, acting):
    run = read_run(ROOT / "docs/records/ab")
    header = structs.replace(
        run.header,
        settings=replace(run.header.settings, **{"metric": "", **settings}),
        plan=structs.replace(run.header.plan, samples=samples),
        runtime=structs.replace(run.header.runtime, world_size=world),
    )
    page = render(replace(run, header=header, summary=None))
    parts = re.findall(r"<h3>(\w+)</h3>\s*<dl.*?>(.*?)</dl>", page, re.DOTALL)
    named = {part: {*re.findall("<dt>(.*?)</dt>", text)} for part, text in parts}
    assert named["Settings"] == ALWAYS | acting
    assert named["Arms"] == {"A", "B1", "B2"}
    assert ("Plan" in named) == ("Task" in named) == (samples > 0)
    assert named["Runtime"] <= acting | {"workers", "world size", "micro batch size"}


# Verdicts


def test_a_change_that_is_better_is_told_from_one_that_is_not(tmp_path):
    found = study(tmp_path / "run", a, moved(-0.5, noise=0.1))
    (row,), own = found.summary.findings, found.summary.arms
    first, second = np.array(values(found))
    apart = second - first
    assert (row.verdict, row.pairs, row.failed, len(apart)) == ("better", 4, (0, 0), 4)
    assert row.mean == pytest.approx(apart.mean())
    assert row.high < 0
    assert found.summary.exit_code == 0
    # The seed gives both the same draw: the differences are far smaller than A's own spread.
    assert own[0].deviation > 5 * apart.std(ddof=1)
    assert own[1].runs == 4
    assert row.two_sigma == ((apart < -2 * own[0].deviation).sum(), 0)
    (far,) = study(tmp_path / "far", a, moved(-9.0), goal="max").summary.findings
    assert (far.verdict, far.two_sigma) == ("worse", (0, far.pairs))


@pytest.mark.parametrize(
    ("change", "settings", "verdict", "code"),
    [
        (moved(0.5), {}, "worse", 3),
        (moved(-0.5), {"goal": "max"}, "worse", 3),
        (moved(0.5), {"goal": "max"}, "better", 0),
        (moved(-0.5), {"smallest_effect": 0.9}, "no difference", 3),
        (moved(-0.5), {"pairs": 3}, "cannot tell", 4),
    ],
)
def test_verdicts_and_exit_codes(change, settings, verdict, code, tmp_path):
    found = study(tmp_path / "run", a, change, **settings).summary
    assert ([row.verdict for row in found.findings], found.exit_code) == ([verdict], code)


def test_a_alone_has_seeds_of_its_own_and_says_what_is_noise(tmp_path):
    found = study(tmp_path / "run", a, smallest_effect=1e9)
    first, second = values(found)
    # All 12 pairs: nothing is to be decided.
    assert (first, second) == ([*map(a, range(12))], [*map(a, range(1000, 1012))])
    (row,) = found.summary.findings
    assert row.noise == pytest.approx(2.201 * np.std(np.subtract(second, first), ddof=1), rel=1e-3)
    assert (row.verdict, found.summary.exit_code) == ("no difference", 3)


class Resumed:
    """A function that goes on from where its last call, or that of another one, ended."""

    def __init__(self, step, memory):
        self.step, self.memory, self.__qualname__ = step, memory, f"Resumed({step})"

    def __call__(self, seed):
        self.memory["left"] = left = self.memory.get("left", 0) - 1
        self.memory["loss"] = self.memory.get("loss", 9.0) - self.step * (left < 0)
        return self.memory["loss"] + a(seed) / 100


def cached(function, memory):
    """The same metric for one seed, whoever asks."""
    found = lambda seed: memory.setdefault(seed, function(seed))
    found.__qualname__ = str(function)
    return found


CACHE = {}


@pytest.mark.parametrize(
    ("arms", "doubts", "pairs"),
    [
        ([a, lambda seed: 0.5], [("seed", ("B",))], 12),
        ([lambda seed: 0.5, moved(-9.0)], [("seed", ("A",))], 12),
        ([lambda seed: 0.5], [("seed", ("A", "A again"))], 12),
        ([a, cached(a, {})], [("shared", ("A", "B"))], 29),
        (
            [a, cached(moved(-5.0), CACHE), cached(moved(-6.0), CACHE)],
            [("shared", ("B1", "B2"))] * 2,
            5,
        ),
        # The seed moves B by no more than a GPU's rounding does; or only whether it is even.
        ([a, lambda seed: 0.5 + 1e-6 * a(seed)], [("seed", ("B",))], 12),
        ([a, lambda seed: 0.5 + a(seed % 2)], [("seed", ("B",))], 12),
        ([a, lambda seed: a(seed) + 1e-6 * a(-seed)], [("shared", ("A", "B"))], 8),
        ([a, Resumed(0.1, {})], [("state", ("B",))], 4),
        ([a, Resumed(0.1, {"left": 3})], [("state", ("B",))], 4),
        ([Resumed(0.1, {}), a], [("state", ("A",))], 4),
    ],
)
def test_runs_that_are_not_of_their_seed_alone_have_no_verdict(arms, doubts, pairs, tmp_path):
    found = study(tmp_path / "run", *arms).summary
    assert [(row.doubt, row.arms) for row in found.findings] == doubts
    assert {(row.verdict, row.pairs, row.two_sigma) for row in found.findings} == {
        ("cannot tell", pairs, None)
    }
    assert found.exit_code == 4


def test_chance_on_a_gpu_is_no_state(tmp_path):
    """The second call differs by a hundredth of what seeds do."""
    chance = np.random.default_rng(0)
    noisy = lambda seed: moved(-0.5, noise=0.1)(seed) + 0.01 * chance.random()
    (row,) = study(tmp_path / "run", a, noisy).summary.findings
    assert (row.verdict, row.doubt) == ("better", None)


def test_several_changes_share_the_chance_of_error_and_end_one_by_one(tmp_path):
    found = study(tmp_path / "run", a, moved(-0.5), moved(0.0, noise=1.0), pairs=8)
    first, second = found.summary.findings
    # With half of the chance each, four pairs never tell.
    assert (first.name, first.verdict, first.pairs) == ("B1", "better", 5)
    assert (second.name, second.verdict, second.pairs) == ("B2", "cannot tell", 8)
    assert [len(metrics) for metrics in values(found)] == [8, 5, 8]
    assert second.needed > 0
    # What is not decided of one change is not none for all.
    other = study(tmp_path / "worse", a, moved(0.5), moved(0.0, noise=1.0), pairs=8).summary
    assert [row.verdict for row in other.findings] == ["worse", "cannot tell"]
    assert other.exit_code == 4
    assert found.summary.exit_code == 0
    assert render(read_run(found.folder)).count('class="chart"') == 2


# Runs


def test_the_order_within_pairs_is_balanced(tmp_path):
    order = []
    own, other = (lambda seed, name=name: order.append(name) or a(seed) for name in "ab")
    study(tmp_path / "run", own, other, pairs=4)
    # In the second pair and the fourth, with the first one's seed too.
    assert "".join(order) == "abbbaaabbbaa"


def test_a_change_that_is_named_twice_has_the_same_seeds_twice(tmp_path):
    """And a key of JSON may be no pattern."""
    changed = """echo '{"acc[0": {seed}}'"""
    words = """echo '{"acc[0": 1{seed}}'""", changed, changed
    found = study(tmp_path / "run", *words, metric="acc[0", pairs=3)
    assert values(found) == [[10, 11, 12], [0, 1, 2], [0, 1, 2]]


@pytest.mark.slow
def test_functions_from_files_give_the_same_in_workers(tmp_path):
    specs = [f"{functions.__file__}:{name}" for name in ("a", "b")]
    here = study(tmp_path / "here", a, b)
    alone = study(tmp_path / "alone", *specs)
    both = study(tmp_path / "both", *specs, workers=2)
    assert timeless(here.folder) == timeless(alone.folder) == timeless(both.folder)
    assert [found.summary.findings for found in (alone, both)] == [here.summary.findings] * 2


def test_a_function_that_does_not_seed_itself_has_the_pairs_seed(tmp_path):
    own = values(study(tmp_path / "run", functions.unseeded, b, pairs=3))[0]
    assert own == values(study(tmp_path / "b", b, functions.unseeded, pairs=3))[1]
    assert len({*own}) == 3


def test_failed_runs_are_counted_shown_and_compared(tmp_path):
    found = study(tmp_path / "run", failing(2), failing(0, 2), pairs=8).summary
    (row,) = found.findings
    assert (row.verdict, row.failed, row.pairs, row.doubt) == ("cannot tell", (1, 2), 8, None)
    assert row.mean == pytest.approx(1 / 8)
    assert [(arm.runs, arm.failed) for arm in found.arms] == [(8, 1), (8, 2)]
    assert "RuntimeError: broke" in found.remarks[1]
    for goal in ("min", "max"):
        rounded = lambda seed: round(a(seed))  # two values at most
        always = study(tmp_path / goal, rounded, failing(*range(6)), goal=goal).summary
        (row,) = always.findings
        assert (row.verdict, row.failed, row.pairs, row.mean) == ("worse", (0, 4), 4, 1.0)
        assert always.exit_code == 3


@pytest.mark.parametrize(
    ("value", "failed"), [(math.nan, 2), (-1e300, 2), (1e-170, 0)], ids="{}".format
)
def test_a_metric_whose_square_is_not_finite_is_a_failed_run(value, failed, tmp_path):
    """And one whose square is zero is zero."""
    found = study(tmp_path / "run", a, lambda seed: value, pairs=2).summary
    assert found.findings[0].failed == (0, failed)
    assert found.arms[1].failure == (f"the metric is {value}" if failed else "")
    assert found.arms[1].mean == (None if failed else 0)


def test_a_study_whose_runs_all_fail_ends_after_a_pair(tmp_path, capsys):
    words = ["ab", "--metric", "loss", "--out", str(tmp_path / "run"), "exit {seed}7", "exit 1"]
    assert main(words) == 2
    assert "exit code 7" in capsys.readouterr().err
    assert recorded(tmp_path / "run") == 2


# What is refused, and how a study goes on


@pytest.mark.parametrize(
    ("arms", "settings", "found"),
    [
        ([3, a], {}, "0 tasks of 2"),
        ([tiny_task.make_task(), a], {}, "1 tasks of 2"),
        ([a, "touch ran"], {}, "The task should be"),
        (["touch ran; echo x={seed}"] * 2, {}, "--metric"),
        (["touch ran"] * 2, {"metric": "loss=("}, "--metric"),
        (["touch ran"] * 2, {"metric": "a(b)(c)"}, "--metric"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_runs(
    arms, settings, found, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=found):
        study(tmp_path / "run", *arms, **settings)
    assert [*tmp_path.iterdir()] == []


def test_modules_of_one_name_beside_two_tasks_are_refused(tmp_path):
    for name, shift in (("old", 0.0), ("new", -5.0)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "shift_of_ab.py").write_text(f"SHIFT = {shift}")
        (folder / "train.py").write_text(
            "from shift_of_ab import SHIFT\ndef train(seed): return seed * 0.1 + SHIFT"
        )
    specs = [f"{tmp_path / name / 'train.py'}:train" for name in ("old", "new")]
    with pytest.raises(ValueError, match=r"shift_of_ab.*new"):
        study(tmp_path / "run", *specs)
    assert not (tmp_path / "run").exists()


def test_a_resumed_study_may_have_more_pairs_but_no_other_functions(tmp_path):
    arms = a, moved(0.0, noise=1.0)
    folder = study(tmp_path / "run", *arms, pairs=3).folder
    for others in ((a,), arms[::-1]):
        with pytest.raises(ValueError, match="functions"):
            steadygrad.ab(*others, resume=folder, pairs=6)
    for pairs in ({"pairs": 6}, {}):
        more = steadygrad.ab(*arms, resume=folder, progress=False, **pairs)
        assert [len(metrics) for metrics in values(more)] == [6, 6]
    whole = study(tmp_path / "whole", *arms, pairs=6)
    assert timeless(folder) == timeless(whole.folder)


def test_the_answer_alone(tmp_path, capsys):
    words = ["ab", "--metric", "x=(.*)", "--quiet", "--pairs", "2", "--out", str(tmp_path / "run")]
    assert main([*words, "echo x={seed}", "echo x=1{seed}"]) == 4
    out, err = capsys.readouterr()
    assert out.startswith("Cannot tell yet: ")
    assert out.count("\n") == 1
    assert err == ""


def test_a_strangers_record_runs_no_command(tmp_path, monkeypatch, capsys):
    mark, folder = tmp_path / "ran", tmp_path / "run"
    words = f"touch {mark}; echo x={{seed}}", "echo x=1{seed}"
    study(folder, *words, metric="x=(.*)", pairs=2)
    shutil.rmtree(folder / "results")
    (folder / "results").mkdir()
    mark.unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert main(["ab", "--resume", str(folder)]) == 2
    assert words[0] in capsys.readouterr().err
    # Elsewhere the commands would find other files than the user's.
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["ab", *words, "--resume", str(folder)]) == 2
    assert not mark.exists()
    assert main(["ab", *words, "--resume", str(folder)]) == 4
    assert mark.exists()


def test_half_a_quotation_in_a_record_is_refused(tmp_path, capsys):
    folder = study(tmp_path / "run", "echo x={seed}", metric="x=(.*)", pairs=1).folder
    rewrite_header(folder, lambda header: header["settings"].update(task="it's"))
    assert main(["ab", "--resume", str(folder)]) == 2
    assert "No closing quotation" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_stopped_study_leaves_no_command_and_goes_on_to_the_same_runs(number, workers, tmp_path):
    """The second run of A does not end until a file is there."""
    mark, go, folder = tmp_path / "pid", tmp_path / "go", tmp_path / "run"
    wait = f"if [ {{seed}} = 1 ] && [ ! -e {go} ]; then echo $$ > {mark}; sleep 60; fi"
    commands = f"{wait}; echo x={{seed}}", "echo x=1{seed}"
    words = ["ab", "--metric", "x=(.*)", "--pairs", "3", "--workers", workers, *commands]
    began = program(*words, "--out", str(folder))
    wait_for(lambda: mark.exists() and mark.read_text())
    began.send_signal(number)
    began.communicate(timeout=30)
    assert began.returncode == (130 if number == signal.SIGINT else -number)
    wait_for(lambda: not alive(int(mark.read_text())), 10)
    assert recorded(folder) < 6
    go.touch()
    assert main(["ab", "--resume", str(folder), "--workers", "1"]) == 4
    whole = study(tmp_path / "whole", *commands, metric="x=(.*)", pairs=3)
    assert timeless(folder) == timeless(whole.folder)
    assert recorded(folder) == 6
