"""Who is named, on networks where that is known."""

import json
import math
import shutil

import pytest
import torch

from steadygrad.record import read_run
from steadygrad.studies.inspect import resume
from steadygrad.studies.order import main_order, seed_for
from steadygrad.tasks import load_task
from tests.unit.studies.helpers import Watcher, tiny
from tests.unit.studies.inspect.runs import look, spec


@pytest.mark.slow
def test_the_deep_network_names_its_layers(tmp_path):
    outcome = look(tmp_path / "run", "digits-deep", steps=20)
    verdict, proposal = outcome.summary["verdict"], outcome.summary["proposal"]
    assert set(verdict["starved"]) == {"patch.0", "patch.1", "patch.2", "patch.3"}
    assert set(verdict["ceiling"]) <= {"trunk.0", "trunk.1"}
    assert verdict["ceiling"]
    assert verdict["broken"] == {}
    # By hand, from the construction: 2**20 for the first layers and 2**4 for the last.
    scales = [proposal["layer_scales"][name] for name in verdict["starved"]]
    assert all(2.0**14 <= scale <= 2.0**26 for scale in scales)
    assert 2.0**-2 <= proposal["loss_scale"] <= 2.0**6
    assert "trunk.1" not in proposal["layer_scales"]
    first, second = outcome.summary["words"][:2]
    assert first.startswith("No single loss scale serves all layers. At 2^")
    assert all(name in first for name in verdict["starved"])
    assert "overflow in trunk." in second
    # What the early layers gain costs the last ones something, and it is said.
    assert set(verdict["price"]) <= {"", "trunk.0", "trunk.1"}
    phases = outcome.summary["phases"]
    assert phases["after"]["skipped"] == 0
    assert phases["before"]["skipped"] >= 5
    # 20 steps are enough for a gap; the losses start at ln 10.
    assert phases["after"]["valid_loss"] < phases["before"]["valid_loss"] - 0.1


def test_nothing_is_at_fault_in_the_language_model(tmp_path):
    summary = look(tmp_path / "run", spec("small_char_lm")).summary
    assert not any(summary["verdict"].values())
    assert summary["proposal"]["layer_scales"] == {}
    assert summary["words"][0].startswith("Nothing is at fault: one loss scale serves every layer.")
    assert summary["words"][-1] == "torch.amp.GradScaler is enough."
    names = [row["name"] for row in summary["layers"]]
    # Under autocast the gradients of embeddings and norms are float32: nothing can be lost.
    assert names == ["", "blocks.0", "blocks.1", "head"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")
def test_a_compiled_model_is_counted_like_another(tmp_path):
    plain, compiled = (look(tmp_path / name, spec(name)).summary for name in ("plain", "compiled"))
    assert compiled["phases"] == plain["phases"]
    assert compiled["verdict"] == plain["verdict"]


@pytest.mark.parametrize("factory", ["sequential", "residual"])
def test_an_overflow_is_attributed_to_its_layer(factory, tmp_path):
    outcome = look(tmp_path / "run", spec(factory), steps=32)
    parts = read_run(outcome.folder).select("part")
    # With one scale of 2**16 others may overflow at first, as they should.
    after = [event["overflows"] for event in parts if event["phase"] == "after"]
    assert {name for overflows in after for name in overflows} == {"blocks.1"}
    phases, broken = outcome.summary["phases"], outcome.summary["verdict"]["broken"]
    assert list(broken) == ["blocks.1"]
    assert broken["blocks.1"] == phases["after"]["skipped"] > 0
    # It does not move the one scale, which comes down for the others' overflows only.
    before = [event for event in parts if event["phase"] == "before"]
    assert sum(event["at_any_scale"].get("blocks.1", 0) for event in before) == broken["blocks.1"]
    assert 2.0**13 <= phases["before"]["loss_scale"] < 2.0**16
    assert phases["after"]["loss_scale"] == outcome.summary["proposal"]["loss_scale"]
    assert outcome.summary["words"][0].startswith("blocks.1 made values that are not finite in")


def test_a_healthy_network_has_no_culprit(whole):
    outcome, monitor = whole
    assert outcome.summary["status"] == "complete"
    assert not outcome.summary["verdict"]["fault"]
    assert monitor.total == monitor.done == 48 * 4 + 2 * math.ceil(64 / 3)


def test_one_loss_scale_is_what_torch_s_scaler_does(whole):
    """All in one go, without boundaries and without checkpoints between parts."""
    task = load_task(spec("healthy"))
    torch.manual_seed(seed_for(0, "init"))
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
    parts = [e for e in read_run(whole[0].folder).select("part") if e["phase"] == "before"]
    assert [part["loss"] for part in parts] == [
        math.fsum(losses[i : i + 2]) / 2 for i in range(0, 16, 2)
    ]
    assert 2.0 ** parts[-1]["scales"][""] == scaler.get_scale() < 2.0**16


@pytest.mark.parametrize("factory", ["always", "hinge"])
def test_two_hundred_steps(factory, tmp_path):
    """A layer that is infinite in every step; and one loss that is soon zero for most samples."""
    outcome = look(tmp_path / "run", spec(factory), steps=200)
    broken = {"blocks.1": 200} if factory == "always" else {}
    assert outcome.summary["verdict"]["broken"] == broken
    assert outcome.summary["verdict"]["starved"] == {}
    assert outcome.summary["phases"]["before"]["loss_scale"] >= 2.0**13
    zero = outcome.summary["layers"][0]["before"]["activations"]["zero"]
    assert (zero > 0.5) == (factory == "hinge")


def test_who_overflows_because_it_is_large_is_not_broken(tmp_path):
    """Of the samples one in 100 has a gradient some thousand times larger."""
    summary = look(tmp_path / "run", spec("spiky"), steps=96).summary
    assert not summary["verdict"]["fault"]
    skipped = summary["phases"]["after"]["skipped"]
    assert summary["verdict"]["spilled"] == {"": skipped}
    assert skipped > 0
    assert "there was overflow in what lies outside of the layers" in summary["words"][1]


def test_a_scale_for_sparse_gradients(tmp_path):
    """Among zeros by construction the loss of all that is there is a small share."""
    summary = look(tmp_path / "run", spec("padded"), steps=24).summary
    assert summary["verdict"]["starved"]["table"] > 0.9
    rows = {row["name"]: row["before"]["activations"]["zero"] for row in summary["layers"]}
    assert rows["table"] > 0.97
    # By hand: gradients are 2**36 times smaller there than behind the two steps.
    assert 2.0**30 <= summary["proposal"]["layer_scales"]["table"] <= 2.0**40


def test_a_layer_with_a_scale_of_its_own_backs_off_alone(whole, tmp_path):
    """The last training again, with scales that are far too large for one layer."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0].folder, folder)
    (folder / "summary.json").unlink()
    kept = []
    for line in (folder / "record.jsonl").read_text().splitlines():
        event = json.loads(line)
        if event["event"] == "proposal":
            event.update(loss_scale=2.0**8, layer_scales={"last": 2.0**12})
        if event["event"] != "end" and event.get("phase") != "after":
            kept.append(json.dumps(event) + "\n")
    (folder / "record.jsonl").write_text("".join(kept))
    resume(folder, monitor=Watcher())
    after = [e for e in read_run(folder).select("part") if e["phase"] == "after"]
    assert {name for event in after for name in event["overflows"]} == {"last"}
    skipped = sum(event["skipped"] for event in after)
    assert skipped > 1
    assert after[-1]["scales"] == {**dict.fromkeys(after[-1]["scales"], 0.0), "": 8.0} | {
        "last": 12.0 - skipped
    }


def test_phases_see_the_same_random_numbers(tmp_path):
    outcome = look(tmp_path / "run", spec("noisy"))
    parts = read_run(outcome.folder).select("part")
    search, after = (
        [event["loss"] for event in parts if event["phase"] == phase]
        for phase in ("search", "after")
    )
    # A part's noise has a deviation of 0.1; what float16 rounds otherwise is a hundredth of it.
    assert after == pytest.approx(search, abs=0.01)


def test_every_value_is_counted(whole):
    """Weights have one gradient a step; the two boundaries of a layer as many as its tensors."""
    parts = read_run(whole[0].folder).select("part")
    assert [event["part"] for event in parts] == [*range(8)] * 3
    before = [event for event in parts if event["phase"] == "before"]
    # Of a step that is left out only what overflowed is counted.
    skipped = sum(event["skipped"] for event in before)
    assert skipped < 8
    for name, size in {"first": 8 * 16 + 16, "blocks.1": 16 * 16 + 16, "last": 17}.items():
        histograms = [event["weights"][name] for event in before]
        total = sum(h["zero"] + sum(h["counts"]) for h in histograms)
        assert total == (16 - skipped) * size
    # The input of the model has no gradient; four rows of sixteen come in from each of two users.
    first = before[-1]["activations"]["first"]
    assert before[-1]["skipped"] == 0
    assert first["zero"] + sum(first["counts"]) == 2 * 2 * 4 * 16


def test_the_largest_exponent_does_not_depend_on_the_scale(whole):
    parts = read_run(whole[0].folder).select("part")
    by_phase = {
        phase: next(e for e in parts if e["phase"] == phase)["largest"]["weights"]["last"]
        for phase in ("before", "after")
    }
    # The same weights and data at first: float16 rounds by less than a binade.
    assert abs(by_phase["before"] - by_phase["after"]) <= 1
    assert -12 < by_phase["before"] < 4


def test_a_model_without_parts_is_one_layer(tmp_path):
    outcome = look(tmp_path / "run", tiny("diverging_branches"))
    assert [row["name"] for row in outcome.summary["layers"]] == [""]
