"""Layers that `inspect` names, on networks where the right ones are known."""

import math

import pytest
import torch

from steadygrad.studies.folder import Results, read_run
from steadygrad.studies.inspect import plan
from steadygrad.studies.inspect.analysis import by_phase, propose
from steadygrad.studies.inspect.schema import TITLES, Part, Proposal
from steadygrad.studies.inspect.trials import trials_of
from steadygrad.studies.order import main_order, seed_for
from steadygrad.tasks import load_task
from tests.unit.studies.framework import tiny
from tests.unit.studies.inspect.runs import look, parts_of, spec


@pytest.mark.slow
def test_nothing_is_at_fault_in_the_language_model(tmp_path):
    summary = look(tmp_path / "run", spec("small_char_lm")).summary.to_dict()
    assert not any(summary["diagnosis"].values())
    assert summary["proposal"]["layer_scales"] == {}
    assert summary["answer"].startswith(
        "One loss scale is enough for every layer (torch.amp.GradScaler): it settled at 2^"
    )
    names = [row["name"] for row in summary["layers"]]
    # Under autocast the gradients of embeddings and norms are float32: nothing can be lost.
    assert names == ["", "blocks.0", "blocks.1", "head"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")
def test_a_compiled_model_is_counted_like_another(tmp_path):
    plain, compiled = (
        look(tmp_path / name, spec(name)).summary.to_dict() for name in ("plain", "compiled")
    )
    assert compiled["phases"] == plain["phases"]
    assert compiled["diagnosis"] == plain["diagnosis"]


@pytest.mark.few(1)
@pytest.mark.parametrize("factory", ["sequential", "residual"])
def test_an_overflow_is_attributed_to_its_layer(factory, tmp_path):
    outcome = look(tmp_path / "run", spec(factory), steps=32)
    parts = parts_of(outcome.folder)
    # With one scale of 2**16 others may overflow at first, as they should.
    after = [event.overflows for event in parts if event.phase == "after"]
    assert {name for overflows in after for name in overflows} == {"blocks.1"}
    phases = outcome.summary.to_dict()["phases"]
    broken = outcome.summary.to_dict()["diagnosis"]["nonfinite_at_any_scale"]
    assert list(broken) == ["blocks.1"]
    assert broken["blocks.1"] == phases["after"]["skipped"] > 0
    # It does not move the one scale, which comes down for the others' overflows only.
    before = [event for event in parts if event.phase == "before"]
    assert sum(event.at_any_scale.get("blocks.1", 0) for event in before) == broken["blocks.1"]
    assert 2.0**13 <= phases["before"]["loss_scale"] < 2.0**16
    assert phases["after"]["loss_scale"] == outcome.summary.to_dict()["proposal"]["loss_scale"]
    assert outcome.summary.answer.startswith("Gradients are not finite at any scale in blocks.1")


def test_a_healthy_network_has_no_culprit(whole):
    outcome, monitor = whole
    assert outcome.summary.status == "complete"
    assert not outcome.summary.to_dict()["diagnosis"]["fault"]
    assert monitor.total == monitor.done == 48 * 4 + 2 * math.ceil(64 / 3)


def test_one_loss_scale_is_what_torch_s_scaler_does(whole):
    """All in one go, without boundaries and without checkpoints between parts."""
    task = load_task(spec("healthy"))
    torch.manual_seed(seed_for(0, "init", 0))
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters(), task.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    order, losses = main_order(len(task.train), 0), []
    for step in range(16):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = task.per_sample_loss(model, task.train.batch(order.take(4 * step, 4))).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    parts = parts_of(whole[0].folder, "before")
    assert [part.loss for part in parts] == [
        math.fsum(losses[i : i + 2]) / 2 for i in range(0, 16, 2)
    ]
    assert 2.0 ** parts[-1].scales[""] == scaler.get_scale() < 2.0**16


@pytest.mark.slow
@pytest.mark.parametrize("factory", ["always", "hinge"])
def test_a_hundred_steps(factory, tmp_path):
    """A layer that is infinite in every step; and one loss that is soon zero for most samples."""
    outcome = look(tmp_path / "run", spec(factory), steps=100)
    broken = {"blocks.1": 100} if factory == "always" else {}
    assert outcome.summary.to_dict()["diagnosis"]["nonfinite_at_any_scale"] == broken
    assert outcome.summary.to_dict()["diagnosis"]["underflowing"] == {}
    assert outcome.summary.to_dict()["phases"]["before"]["loss_scale"] >= 2.0**13
    zero = outcome.summary.to_dict()["layers"][0]["before"]["activations"]["zero"]
    assert (zero > 0.5) == (factory == "hinge")


@pytest.mark.slow
def test_who_overflows_because_it_is_large_is_not_broken(tmp_path):
    """Of the samples one in 100 has a gradient some thousand times larger."""
    summary = look(tmp_path / "run", spec("spiky"), steps=96).summary.to_dict()
    assert not summary["diagnosis"]["fault"]
    skipped = summary["phases"]["after"]["skipped"]
    assert summary["diagnosis"]["overflowed_after"] == {"": skipped}
    assert skipped > 0
    assert "proposed scales overflowed in the rest of the model" in summary["remarks"][0]


def test_a_scale_for_sparse_gradients(tmp_path):
    """Among zeros by construction the loss of all that is there is a small share."""
    summary = look(tmp_path / "run", spec("padded"), steps=24).summary.to_dict()
    assert summary["diagnosis"]["underflowing"]["table"] > 0.9
    rows = {row["name"]: row["before"]["activations"]["zero"] for row in summary["layers"]}
    assert rows["table"] > 0.97
    # By hand: gradients are 2**36 times smaller there than behind the two steps.
    assert 2.0**30 <= summary["proposal"]["layer_scales"]["table"] <= 2.0**40


def test_a_layer_with_a_scale_of_its_own_backs_off_alone(tmp_path, monkeypatch):
    """The last training with scales that are far too large for one layer."""
    chosen = Proposal(loss_scale=2.0**8, layer_scales={"last": 2.0**12})
    monkeypatch.setattr(plan, "propose", lambda parts: chosen)
    look(tmp_path / "run", spec("healthy"))
    after = parts_of(tmp_path / "run", "after")
    assert {name for event in after for name in event.overflows} == {"last"}
    skipped = sum(event.skipped for event in after)
    assert skipped > 1
    assert after[-1].scales == {**dict.fromkeys(after[-1].scales, 0.0), "": 8.0} | {
        "last": 12.0 - skipped
    }


def test_what_each_trial_needs_and_is_told(whole):
    """So that a worker needs nothing but its job and the checkpoints."""
    outcome, _ = whole
    run = read_run(outcome.folder)
    known = [part for part in run.select(Part) if part.phase != "after"]
    # In the order in which workers may have ended them.
    journal, trials = Results(known[::-1]), trials_of(run.header, run.results)
    proposal = propose(by_phase(journal))
    tried = {"loss_scale": proposal.loss_scale, "layer_scales": proposal.layer_scales}
    assert tried == {name: outcome.summary.to_dict()["proposal"][name] for name in tried}
    for trial in trials:
        job = trial.job(journal)
        scales = {} if trial.key[1] != "after" else tried
        fields = ("kind", "phase", "part") if trial.key[0] == "part" else ("kind", "phase")
        assert job == dict(zip(fields, trial.key, strict=True)) | scales
    # The first two trainings do not wait for each other; the third waits for both.
    needs = {trial.key: set(trial.needs) for trial in trials}
    keys = {phase: [("part", phase, part) for part in range(8)] for phase in TITLES}
    for phase in ("before", "search"):
        assert needs[keys[phase][0]] == set()
        assert needs[keys[phase][5]] == {keys[phase][4]}
    assert needs["phase", "before"] == {keys["before"][7]}
    assert needs[keys["after"][0]] == {*keys["before"], *keys["search"]}
    assert needs[keys["after"][5]] == {*keys["before"], *keys["search"], keys["after"][4]}
    assert needs["phase", "after"] >= {keys["after"][7]}
    assert run.header.plan.work == sum(trial.cost for trial in trials)


@pytest.mark.slow
def test_a_budget_that_is_over_too_early(whole, tmp_path):
    (complete, monitor), said = whole, {}
    for share in (0.01, 0.3, 0.6, 0.8):
        folder = tmp_path / str(share)
        outcome = look(folder, spec("healthy"), at=math.ceil(share * monitor.total))
        said[share] = outcome.too_little
        assert (outcome.summary.proposal is None) == (share < 0.7)
    first, none = "The budget was over before scales were found", "nothing is said of the layers"
    early = ", nor was an eighth of the first training done"
    assert said[0.01] == f"{first}{early}: {none}"
    assert said[0.3] == said[0.6] == f"{first}: {none}"
    assert said[0.8] is complete.too_little is None


def test_phases_see_the_same_random_numbers(tmp_path):
    outcome = look(tmp_path / "run", spec("noisy"))
    parts = parts_of(outcome.folder)
    search, after = (
        [event.loss for event in parts if event.phase == phase] for phase in ("search", "after")
    )
    # A part's noise has a deviation of 0.1; what float16 rounds otherwise is a hundredth of it.
    assert after == pytest.approx(search, abs=0.01)


def test_every_value_is_counted(whole):
    """Weights have one gradient a step; the two boundaries of a layer as many as its tensors."""
    parts = parts_of(whole[0].folder)
    assert [event.part for event in parts] == [*range(8)] * 3
    before = [event for event in parts if event.phase == "before"]
    # Of a step that is left out only what overflowed is counted.
    skipped = sum(event.skipped for event in before)
    assert skipped < 8
    for name, size in {"first": 8 * 16 + 16, "blocks.1": 16 * 16 + 16, "last": 17}.items():
        histograms = [event.weights[name] for event in before if name in event.weights]
        total = sum(h.zero + sum(h.counts) for h in histograms)
        assert total == (16 - skipped) * size
    # The input of the model has no gradient; four rows of sixteen come in from each of two users.
    first = before[-1].activations["first"]
    assert before[-1].skipped == 0
    assert first.zero + sum(first.counts) == 2 * 2 * 4 * 16


def test_the_largest_exponent_does_not_depend_on_the_scale(whole):
    parts = parts_of(whole[0].folder)
    # The scale of the first phase comes down until its second part.
    by_phase = {part.phase: part.largest["weights"]["last"] for part in parts if part.part == 1}
    # Nearly the same weights, and the same data: float16 rounds by less than a binade.
    assert abs(by_phase["before"] - by_phase["after"]) <= 1
    assert -12 < by_phase["before"] < 4


def test_a_model_without_parts_is_one_layer(tmp_path):
    outcome = look(tmp_path / "run", tiny("diverging_branches"))
    assert [row["name"] for row in outcome.summary.to_dict()["layers"]] == [""]
