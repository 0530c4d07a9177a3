"""Layers that `inspect` names, on networks where the right ones are known."""

import math
from itertools import pairwise

import pytest
import torch

from steadygrad.studies.course import Order, seed_for
from steadygrad.studies.folder import dumps, read_run
from steadygrad.studies.inspect import trials
from steadygrad.studies.inspect.schema import Effect, Forward, Proposal
from steadygrad.studies.page import render
from steadygrad.tasks import load_task
from tests.unit.studies.framework import go_on, lines, tiny
from tests.unit.studies.inspect.runs import Watcher, look, parts_of, spec


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """One complete study of the healthy task, shared by the tests that only read it."""
    torch.set_num_threads(1)
    monitor = Watcher()
    return look(tmp_path_factory.mktemp("whole") / "run", spec("healthy"), monitor=monitor), monitor


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*Function.* should not be instantiated")
def test_a_compiled_model_is_counted_like_another(tmp_path):
    """In three phases, with a scaler each; a layer's scale times that of the loss is the same."""

    def seen(part):
        (_, loss), *layers = part.scales.items()
        scales = [(name, log2 + loss) for name, log2 in layers]
        return part.loss, scales, part.overflows, part.skipped

    found = []
    for name in ("plain", "compiled"):
        parts = parts_of(look(tmp_path / name, spec(name)).folder)
        found.append([seen(part) for part in parts])
    assert found[0] == found[1]
    assert len(found[0]) == 24


@pytest.mark.few(1)
@pytest.mark.parametrize("factory", ["sequential", "residual"])
def test_an_overflow_is_attributed_to_its_layer(factory, tmp_path):
    outcome = look(tmp_path / "run", spec(factory), steps=32)
    before, after = (parts_of(outcome.folder, phase) for phase in ("before", "after"))
    # With one scale of 2**16 others may overflow at first, as they should.
    assert {name for part in after for name in part.overflows} == {"blocks.1"}
    found = outcome.summary
    (count,) = found.effect("nonfinite_at_any_scale").values()
    assert found.findings[1] == Effect(name="nonfinite_at_any_scale", layers={"blocks.1": count})
    assert count == found.phases["after"].skipped > 0
    # It does not move the one scale, which comes down for the others' overflows only.
    assert sum(part.at_any_scale.get("blocks.1", 0) for part in before) == count
    assert 2.0**13 <= found.phases["before"].loss_scale < 2.0**16
    assert found.phases["after"].loss_scale == found.proposal.loss_scale


def test_one_loss_scale_is_what_torch_s_scaler_does(tmp_path, monkeypatch):
    """All in one go, without boundaries and parts."""
    monkeypatch.setattr(trials, "INTERVAL", 3)
    found, task = look(tmp_path / "run", spec("healthy")), load_task(spec("healthy"))
    assert found.summary.effect("underflowing") == {}
    torch.manual_seed(seed_for(0, "init", 0))
    model = task.make_model()
    optimizer = task.make_optimizer(model.parameters(), task.lr)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16, growth_interval=3)
    order, losses, scales = Order(len(task.train), 0), [], []
    for step in range(16):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = task.per_sample_loss(model, task.train.batch(order.take(4 * step, 4))).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(math.log2(scaler.get_scale()))
    parts = parts_of(found.folder, "before")
    means = [math.fsum(losses[i : i + 2]) / 2 for i in range(0, 16, 2)]
    assert [part.loss for part in parts] == means
    assert [part.scales[""] for part in parts] == scales[1::2]
    # It came down, and went up again.
    assert any(earlier < later for earlier, later in pairwise(scales))


def test_a_layer_with_a_scale_of_its_own_backs_off_alone(tmp_path, monkeypatch):
    """The last training with scales that are far too large for one layer."""
    chosen = Proposal(loss_scale=2.0**8, layer_scales={"last": 2.0**12})
    monkeypatch.setattr(trials, "propose", lambda parts: chosen)
    look(tmp_path / "run", spec("healthy"))
    after = parts_of(tmp_path / "run", "after")
    assert {name for part in after for name in part.overflows} == {"last"}
    skipped = sum(part.skipped for part in after)
    assert skipped > 1
    moved = {"": 8.0, "last": 12.0 - skipped}
    assert after[-1].scales == {**dict.fromkeys(after[-1].scales, 0.0), **moved}


def test_a_model_without_parts_is_one_layer(tmp_path):
    outcome = look(tmp_path / "run", tiny("diverging_above"))
    assert [row.name for row in outcome.summary.layers] == [""]


# A forward pass that overflows

CAUSE = "the forward pass of 'blocks.1' made the first values that are not finite"


@pytest.mark.slow
def test_a_forward_pass_that_overflows_is_the_first_finding_and_moves_no_scale(tmp_path):
    outcome = look(tmp_path / "run", spec("overflowing"), steps=64)
    found, parts = outcome.summary, parts_of(outcome.folder, "before")
    count = sum(part.forward.get(CAUSE, 0) for part in parts)
    assert found.findings[1] == Forward(causes={CAUSE: count}, count=count, steps=64)
    assert found.effect("nonfinite_at_any_scale") == {}
    assert found.answer in render(read_run(outcome.folder))
    # The one scale comes down by a half for each of the other overflows only.
    skipped = sum(part.skipped for part in parts)
    assert 0 < count < skipped < 64
    assert parts[-1].scales[""] == 16.0 - (skipped - count)
    assert {name for part in parts for name in part.at_any_scale} == set()


def test_no_step_is_finite(tmp_path):
    outcome = look(tmp_path / "run", spec("always_overflowing"))
    verdict, forward, *_ = outcome.summary.findings
    assert (outcome.summary.status, verdict.verdict) == ("complete", "unseen")
    assert forward == Forward(causes={CAUSE: 16}, count=16, steps=16)
    assert outcome.summary.proposal is None
    assert [part.loss for part in parts_of(outcome.folder)] == [None] * 24


@pytest.mark.slow
@pytest.mark.parametrize(("factory", "nan"), [("unlabelled", True), ("lossless", False)])
def test_a_loss_that_is_not_finite_is_no_fault_of_a_layer(factory, nan, tmp_path):
    found = look(tmp_path / "run", spec(factory), steps=64).summary
    (forward,) = (finding for finding in found.findings if isinstance(finding, Forward))
    ((cause, count),) = forward.causes.items()
    assert 0 < count < 64
    assert ("NaN is in the batch" in cause) == nan
    assert found.effect("nonfinite_at_any_scale") == {}


@pytest.mark.slow
@pytest.mark.parametrize(("share", "kept"), [(0.2, 0), (0.5, 1), (0.8, 2)])
def test_a_phase_that_was_cut_is_trained_again(whole, tmp_path, share, kept):
    (complete, monitor), folder = whole, tmp_path / "run"
    look(folder, spec("healthy"), at=int(share * monitor.total))
    assert len(read_run(folder).results) == kept
    outcome, watcher = go_on(folder)
    assert dumps(outcome.summary) == dumps(complete.summary)
    # It would say so if something gave other numbers.
    assert watcher.lines == []
    # What was evaluated before is not counted.
    assert abs(watcher.total - watcher.done) <= 44
    assert lines(folder) == lines(complete.folder)
