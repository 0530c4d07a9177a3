"""Whole studies of commands, functions and tasks."""

import json
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import steadygrad
from steadygrad.cli import main
from steadygrad.studies.ab.schema import Run
from steadygrad.studies.ab.trials import arms_of
from steadygrad.studies.folder import read_run
from steadygrad.studies.page import render
from tests.unit.cli.quick import program, run_program
from tests.unit.studies import tiny_task
from tests.unit.studies.ab import functions
from tests.unit.studies.framework import alive, recorded, timeless, tiny, wait_for
from tests.unit.studies.results import rewrite_header

HERE = Path(__file__).parent
TRAIN = f"{sys.executable} {HERE / 'train.py'} --seed {{seed}}"
QUIET = {"progress": False, "device": "cpu", "threads": 1}


def arms(*options):
    """Commands with these options."""
    return [f"{TRAIN} {more}".strip() for more in options]


def study(tmp_path, *options, **settings):
    """A study of commands."""
    given = {"metric": r"val_loss=(\S+)", "out": tmp_path / "run", **QUIET, **settings}
    return steadygrad.ab(*arms(*options), **given)


def values(folder):
    """Metrics by arm and pair."""
    return {(r.arm, r.pair): r.value for r in read_run(folder).select(Run)}


def test_a_command_that_is_better_is_told_from_one_that_is_not(tmp_path):
    found = study(tmp_path, "", "--gain 0.2")
    (row,) = found.summary.findings
    runs = values(found.folder)
    apart = np.array([runs[1, pair] - runs[0, pair] for pair in range(5)])
    assert (row.verdict, row.pairs, row.failed, len(runs)) == ("better", 5, (0, 0), 10)
    assert row.mean == pytest.approx(apart.mean())
    assert row.high < 0
    assert found.summary.exit_code == 0
    # The seed gives both the same draw: the differences are far smaller than A's own spread.
    a, b = found.summary.arms
    assert a.deviation > 5 * apart.std(ddof=1)
    assert b.runs == 5
    # A difference of 0.2 is at most two deviations of A's runs, of about 0.1.
    limit = 2 * a.deviation
    assert row.two_sigma == (int((apart < -limit).sum()), 0)


@pytest.mark.parametrize(
    ("options", "settings", "verdict", "code"),
    [
        (["", "--gain -0.2"], {}, "worse", 3),
        (["", "--gain 0.2"], {"goal": "max"}, "worse", 3),
        (["", "--gain -0.2"], {"goal": "max", "metric": "loss"}, "better", 0),
        (["", "--gain 0.2"], {"smallest_effect": 0.5}, "no difference", 3),
        (["", "--gain 0.2"], {"pairs": 4}, "cannot tell", 4),
    ],
)
def test_verdicts_and_exit_codes(options, settings, verdict, code, tmp_path):
    found = study(tmp_path, *options, **settings).summary
    assert ([row.verdict for row in found.findings], found.exit_code) == ([verdict], code)


def test_a_alone_has_seeds_of_its_own_and_says_what_is_noise(tmp_path):
    found = study(tmp_path, "", smallest_effect=1e9)
    runs = read_run(found.folder).select(Run)
    # All 12 pairs: nothing is to be decided.
    assert sorted(run.seed for run in runs) == [*range(12), *range(1000, 1012)]
    apart = [values(found.folder)[1, pair] - values(found.folder)[0, pair] for pair in range(12)]
    (row,) = found.summary.findings
    assert row.noise == pytest.approx(2.201 * np.std(apart, ddof=1), rel=1e-3)
    assert (row.verdict, found.summary.exit_code) == ("no difference", 3)


def test_a_alone_counts_pairs_without_a_failed_run(tmp_path):
    def metric(seed):
        return seed % 7 + 1 / ((seed + 1) % 2)

    (row,) = steadygrad.ab(metric, pairs=8, out=tmp_path / "run", **QUIET).summary.findings
    assert (row.pairs, row.failed, row.verdict) == (4, (4, 4), "no difference")


def test_a_change_that_is_named_twice_has_the_same_seeds_twice(tmp_path):
    words = "echo x=1{seed}", "echo x={seed}", "echo x={seed}"
    found = steadygrad.ab(*words, metric="x=(.*)", pairs=3, out=tmp_path / "run", **QUIET)
    runs = values(found.folder)
    assert [runs[2, pair] for pair in range(3)] == [runs[1, pair] for pair in range(3)] == [0, 1, 2]


def test_a_metric_that_does_not_hang_on_the_seed_tells_nothing(tmp_path):
    given = {"metric": "x=(.*)", "pairs": 8, "out": tmp_path / "run", **QUIET}
    found = steadygrad.ab("echo x=1", "echo x=0.5", **given).summary
    (row,) = found.findings
    assert (row.verdict, row.pairs, row.mean, row.needed) == ("cannot tell", 8, -0.5, None)
    assert [arm.deviation for arm in found.arms] == [0, 0]
    assert len(found.remarks) == 3


def test_several_changes_share_the_chance_of_error_and_end_one_by_one(tmp_path):
    found = study(tmp_path, "", "--gain 0.3", "--gain 0.001 --noise 0.1", pairs=9)
    first, second = found.summary.findings
    runs = read_run(found.folder).select(Run)
    # With half of the chance each, five pairs never tell.
    assert (first.name, first.verdict, first.pairs) == ("B1", "better", 6)
    assert (second.name, second.verdict, second.pairs) == ("B2", "cannot tell", 9)
    assert [sum(run.arm == arm for run in runs) for arm in range(3)] == [9, 6, 9]
    assert second.needed > 0
    assert second.hours > 0
    assert found.summary.exit_code == 0


def test_the_order_within_pairs_is_balanced(tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(functions, "a", lambda seed: order.append("a") or float(seed))
    monkeypatch.setattr(functions, "b", lambda seed: order.append("b") or seed + 0.1 * seed % 1)
    steadygrad.ab(functions.a, functions.b, pairs=4, out=tmp_path / "run", **QUIET)
    assert "".join(order) == "abbaabba"


def test_failed_runs_are_counted_shown_and_compared(tmp_path):
    found = study(tmp_path, "--fail 2", "--fail 1 2", pairs=8).summary
    (row,) = found.findings
    assert (row.verdict, row.failed, row.pairs) == ("cannot tell", (1, 2), 8)
    assert row.mean == pytest.approx(1 / 8)
    assert [(arm.runs, arm.failed) for arm in found.arms] == [(8, 1), (8, 2)]
    assert "exit code 1, after 'broke'" in found.remarks[1]
    always = study(tmp_path / "b", "", "--fail 0 1 2 3 4 5").summary
    (row,) = always.findings
    assert (row.verdict, row.failed, row.pairs, row.mean) == ("worse", (0, 5), 5, 1.0)
    assert always.exit_code == 3


def test_a_study_whose_runs_all_fail_ends_after_a_pair(tmp_path, capsys):
    words = arms("--fail 0", "--fail 0 1")
    code = main(["ab", "--metric", "loss", "--out", str(tmp_path / "run"), *words])
    assert code == 2
    assert "exit code 1, after 'broke'" in capsys.readouterr().err
    assert recorded(tmp_path / "run") == 2


@pytest.mark.parametrize("metric", ["loss=(", "(a", "a(b)(c)"])
def test_a_pattern_that_is_none_is_refused_before_anything_runs(metric, tmp_path, capsys):
    words = ["ab", "--metric", metric, "--out", str(tmp_path / "run"), *arms("", "")]
    assert main(words) == 2
    assert "--metric" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_answer_alone_and_json(tmp_path, capsys):
    words = ["ab", "--metric", "loss", "--quiet", "--out", str(tmp_path / "run"), "--pairs", "5"]
    assert main([*words, "--", *arms("", "--gain 0.2")]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert out.startswith("B is better: ")
    assert err == ""
    words = ["ab", "--metric", "loss", "--json", "--quiet", "--out", str(tmp_path / "b")]
    assert main([*words, "--pairs", "3", *arms("", "--gain 0.2")]) == 4
    found = json.loads(capsys.readouterr().out)["findings"][0]
    assert (found["pairs"], found["high"]) == (3, "inf")


def test_functions_from_files_give_the_same_in_workers(tmp_path):
    specs = [f"{functions.__file__}:{name}" for name in ("a", "b")]
    here = steadygrad.ab(functions.a, functions.b, out=tmp_path / "here", **QUIET)
    alone = steadygrad.ab(*specs, out=tmp_path / "alone", **QUIET)
    both = steadygrad.ab(*specs, workers=2, out=tmp_path / "both", **QUIET)
    assert timeless(here.folder) == timeless(alone.folder) == timeless(both.folder)
    assert [found.summary.findings for found in (alone, both)] == [here.summary.findings] * 2
    assert here.summary.findings[0].verdict == "better"


def test_a_function_that_does_not_seed_itself_has_the_pairs_seed(tmp_path):
    found = steadygrad.ab(functions.unseeded, functions.b, pairs=3, out=tmp_path / "run", **QUIET)
    again = steadygrad.ab(functions.b, functions.unseeded, pairs=3, out=tmp_path / "b", **QUIET)
    first, second = values(found.folder), values(again.folder)
    assert [first[0, pair] for pair in range(3)] == [second[1, pair] for pair in range(3)]
    assert len({first[0, pair] for pair in range(3)}) == 3


def test_a_function_that_raises_has_failed(tmp_path):
    found = steadygrad.ab(functions.a, lambda seed: 1 / 0, pairs=2, out=tmp_path / "run", **QUIET)
    assert found.summary.findings[0].failed == (0, 2)
    assert "ZeroDivisionError" in found.summary.arms[1].failure
    nothing = steadygrad.ab(
        functions.a, lambda s: float("nan"), pairs=2, out=tmp_path / "b", **QUIET
    )
    assert nothing.summary.arms[1].failure == "the metric is nan"


def test_tasks_are_paired(tmp_path):
    """The same initial weights and order of data: equal tasks give equal losses."""
    task = tiny_task.make_task()
    same = steadygrad.ab(task, tiny_task.make_task(), samples=64, out=tmp_path / "run", **QUIET)
    runs = values(same.folder)
    assert [runs[0, pair] for pair in range(5)] == [runs[1, pair] for pair in range(5)]
    assert len({runs[0, pair] for pair in range(5)}) == 5
    (row,) = same.summary.findings
    assert (row.verdict, row.mean, row.low, row.high) == ("no difference", 0, 0, 0)
    itself = steadygrad.ab(task, samples=64, pairs=5, out=tmp_path / "itself", **QUIET)
    runs = values(itself.folder)
    assert len({*runs.values()}) == 10
    assert itself.summary.findings[0].noise > 0


def test_another_learning_rate_is_told_by_workers_as_by_one_process(tmp_path):
    words = [tiny(), f"{functions.__file__}:faster"]
    options = {"samples": 256, "budget": 120, **QUIET}
    alone = steadygrad.ab(*words, out=tmp_path / "alone", **options)
    both = steadygrad.ab(*words, workers=2, out=tmp_path / "both", **options)
    assert timeless(alone.folder) == timeless(both.folder)
    assert alone.summary.findings == both.summary.findings
    assert alone.summary.findings[0].verdict == "better"


def test_each_tasks_data_and_start_are_in_the_record(tmp_path):
    task, start = tiny_task.make_task(), tmp_path / "start.pt"
    start.write_bytes(b"one")
    other = replace(task, start=start, provenance={"corpus": "mine"})
    before = arms_of([task, other]).provenance
    start.write_bytes(b"two")
    after = arms_of([task, other]).provenance
    assert {key for key in before if before[key] != after[key]} == {"B1: Task.start"}
    assert before["B1: corpus"] == "mine"
    assert task.provenance == arms_of([task]).provenance == tiny_task.make_task().provenance


def test_a_task_that_diverges_has_failed(tmp_path):
    tasks = tiny_task.make_task(), tiny_task.make_task(lr=1e30)
    found = steadygrad.ab(*tasks, samples=64, out=tmp_path / "run", **QUIET).summary
    assert (found.findings[0].verdict, found.findings[0].failed) == ("worse", (0, 5))


def test_each_task_ends_on_a_whole_step_of_its_own(tmp_path):
    tasks = tiny_task.make_task(batch_size=8), tiny_task.make_task(batch_size=12)

    def runs(samples):
        out = tmp_path / f"{samples}"
        return values(steadygrad.ab(*tasks, samples=samples, pairs=1, out=out, **QUIET).folder)

    # Six and four steps of both; the schedule of the learning rate ends with them.
    assert runs(53) == runs(48) != runs(40)
    assert runs(3)[1, 0] == runs(12)[1, 0]


@pytest.mark.parametrize(("value", "failed"), [("1e-170", 0), ("-1e300", 2)])
def test_a_metric_whose_square_is_infinite_is_a_failed_run(value, failed, tmp_path):
    """And one whose square is zero is zero."""
    words = "echo x={seed}", f"echo x={value}"
    found = steadygrad.ab(*words, metric="x=(.*)", pairs=2, out=tmp_path / "b", **QUIET)
    assert found.summary.findings[0].failed == (0, failed)
    assert found.summary.arms[1].failure == (f"the metric is {float(value)}" if failed else "")


def test_what_is_no_arm_is_refused(tmp_path):
    with pytest.raises(ValueError, match="Found 0 tasks of 2"):
        steadygrad.ab(3, functions.a, out=tmp_path / "run", **QUIET)


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
        steadygrad.ab(*specs, out=tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists()


def test_a_text_beside_a_function_is_no_command(tmp_path):
    with pytest.raises(ValueError, match="The task should be"):
        steadygrad.ab(functions.a, f"touch {tmp_path}/ran", out=tmp_path / "run", **QUIET)
    assert not (tmp_path / "ran").exists()


def test_commands_want_a_metric(tmp_path):
    with pytest.raises(ValueError, match="--metric"):
        steadygrad.ab(*arms("", ""), out=tmp_path / "run", **QUIET)


def test_a_resume_with_other_functions_is_refused(tmp_path):
    folder = steadygrad.ab(functions.a, functions.b, pairs=2, out=tmp_path / "r", **QUIET).folder
    for others in ((functions.a,), (functions.b, functions.a)):
        with pytest.raises(ValueError, match="functions"):
            steadygrad.ab(*others, resume=folder, pairs=4)


def test_a_resumed_study_may_have_more_pairs(tmp_path):
    found = study(tmp_path, "", "--gain 0.001", pairs=3)
    folder = str(found.folder)
    assert main(["ab", "--resume", folder, "--pairs", "6"]) == 4
    assert len(values(folder)) == 12
    whole = study(tmp_path / "b", "", "--gain 0.001", pairs=6)
    both = [read_run(path).summary["findings"] for path in (folder, whole.folder)]
    for findings in both:
        findings[0].pop("hours")  # measured
    assert both[0] == both[1]
    assert main(["ab", "--resume", folder]) == 4
    assert len(values(folder)) == 12


def test_a_key_of_json_may_be_no_pattern(tmp_path):
    words = ["""echo '{"acc[0": {seed}}'"""] * 2
    found = steadygrad.ab(*words, metric="acc[0", pairs=2, out=tmp_path / "run", **QUIET)
    assert values(found.folder) == {(0, 0): 0, (1, 0): 1000, (0, 1): 1, (1, 1): 1001}


def test_a_record_with_more_arms_than_tasks_ends_in_one_line(tmp_path, capsys):
    names, options = ("digits-classifier", "digits-autoencoder"), {"samples": 64, **QUIET}
    task = steadygrad.ab(*names, pairs=1, out=tmp_path / "r", **options)
    shutil.rmtree(task.folder / "results")
    (task.folder / "results").mkdir()
    rewrite_header(task.folder, lambda header: header["plan"]["arms"].append("third"))
    assert main(["ab", "--resume", str(task.folder)]) == 2
    assert "IndexError" in capsys.readouterr().err


def test_tasks_and_functions_are_not_compared(tmp_path):
    with pytest.raises(ValueError, match="Found 1 tasks of 2"):
        steadygrad.ab(tiny_task.make_task(), functions.a, out=tmp_path / "run", **QUIET)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_study_that_was_stopped_goes_on_to_the_same_runs(number, workers, tmp_path):
    words = ["ab", "--metric", "loss", *arms("--sleep 0.2", "--sleep 0.2 --gain 0.03")]
    code, _, err = run_program(*words, "--out", str(tmp_path / "whole"), module="steadygrad")
    assert code == 0, err
    folder = tmp_path / "run"
    began = program(*words, "--out", str(folder), "--workers", workers, module="steadygrad")
    wait_for(lambda: recorded(folder) >= 3)
    began.send_signal(number)
    began.communicate()
    assert began.returncode == (130 if number == signal.SIGINT else -number)
    assert 3 <= recorded(folder) < recorded(tmp_path / "whole")
    code, _, err = run_program("ab", "--resume", str(folder), module="steadygrad")
    assert code == 0, err
    assert timeless(folder) == timeless(tmp_path / "whole")


def test_ctrl_c_ends_the_command_in_hand(tmp_path):
    mark = tmp_path / "pid"
    slow = f"echo $$ > {mark}; sleep 60; echo x=1"
    began = program("ab", "--metric", "x=(.)", slow, slow, "--out", str(tmp_path / "run"))
    wait_for(lambda: mark.exists() and mark.read_text())
    began.send_signal(signal.SIGINT)
    began.communicate(timeout=30)
    wait_for(lambda: not alive(int(mark.read_text())), 5)
    assert recorded(tmp_path / "run") == 0


def test_kill_leaves_no_command(tmp_path):
    mark = tmp_path / "pid"
    slow = f"echo $$ > {mark}; sleep 60; echo x=1"
    began = program("ab", "--metric", "x=(.)", slow, slow, "--out", str(tmp_path / "run"))
    wait_for(lambda: mark.exists() and mark.read_text())
    began.kill()
    began.communicate(timeout=30)
    wait_for(lambda: not alive(int(mark.read_text())), 10)


def test_a_strangers_record_runs_no_command(tmp_path, monkeypatch, capsys):
    mark = tmp_path / "ran"
    command = f"touch {mark}; {TRAIN}"
    given = {"metric": "loss", "pairs": 2, "out": tmp_path / "run", **QUIET}
    steadygrad.ab(command, f"{command} --gain 0.1", **given)
    shutil.rmtree(tmp_path / "run" / "results")
    (tmp_path / "run" / "results").mkdir()
    mark.unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "elsewhere"))
    assert main(["ab", "--resume", str(tmp_path / "run")]) == 2
    assert command in capsys.readouterr().err
    assert not mark.exists()
    words = [command, f"{command} --gain 0.1"]
    # Elsewhere the commands would find other files than the user's.
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert main(["ab", *words, "--resume", str(tmp_path / "run")]) == 2
    assert not mark.exists()
    assert main(["ab", *words, "--resume", str(tmp_path / "run")]) == 4
    assert mark.exists()


def test_the_page_has_a_chart_for_each_change_and_no_stand_in(tmp_path):
    found = study(tmp_path, "", "--gain 0.2", "--fail 0", pairs=3)
    page = render(read_run(found.folder))
    assert page.count('class="chart"') == 2
    assert found.summary.answer in page.replace("&#39;", "'")
    assert "<h3>Settings</h3>" in page
    assert "<h3>Task</h3>" not in page
    task = steadygrad.ab(tiny_task.make_task(), pairs=1, samples=8, out=tmp_path / "b", **QUIET)
    assert "<h3>Task</h3>" in render(read_run(task.folder))


def test_half_a_quotation_in_a_record_is_refused(tmp_path, capsys):
    folder = study(tmp_path, "", pairs=1).folder
    rewrite_header(folder, lambda header: header["settings"].update(task="it's"))
    assert main(["ab", "--resume", str(folder)]) == 2
    assert "No closing quotation" in capsys.readouterr().err
