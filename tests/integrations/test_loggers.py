"""Numbers by names, and how trainers' reports and loggers show them."""

import pytest
import torch
from torch import nn

from steadygrad.balance import LossBalancer
from steadygrad.integrations.metrics import balancer_metrics, noise_metrics
from steadygrad.noise import NoiseScale
from tests.integrations import quiet
from tests.integrations.by_hand import token_batches
from tests.integrations.pages import after, blocks, run

PAGE = "loggers.md"
# Lightning's remarks on how these tests train.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*num_workers"),
    pytest.mark.filterwarnings("ignore:.*litlogger"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec"),
]


def measured(steps=5):
    """A noise scale after some steps, and the one of two groups' names."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    noise = NoiseScale(model, samples=4)
    for _ in range(steps):
        for _ in range(3):
            (model(torch.randn(4, 4) + 1).square().mean() / 3).backward()
        noise.step()
        model.zero_grad()
    return noise


def test_weights_and_biases_has_the_pages_log():
    wandb = quiet.importorskip("wandb")
    assert {"data", "step"} <= set(wandb.Run.log.__annotations__)


def test_names_are_those_of_the_page():
    rows = noise_metrics(measured())
    assert set(rows) >= {"steadygrad/noise_scale/by_group/0", "steadygrad/noise_scale/by_group/1"}
    assert blocks(PAGE, "text")[0].split() == [name for name in rows if "by_group" not in name]
    assert rows["steadygrad/noise_scale/resolved"] == 1.0


def test_what_is_not_finite_is_left_out():
    rows = noise_metrics(measured(steps=1))
    assert "steadygrad/noise_scale/high" not in rows
    assert rows["steadygrad/noise_scale/resolved"] == 0.0


def test_shares_of_a_balancer():
    balancer = LossBalancer({"a": 1, "b": 3})
    assert balancer_metrics(balancer) == {}
    y = torch.ones(2, 3, requires_grad=True)
    balancer.backward({"a": y.sum(), "b": y.square().sum()}, y)
    assert balancer_metrics(balancer)["steadygrad/balancer/target_b"] == pytest.approx(0.75)


def test_the_pages_diff_logs():
    logged = []
    found = type("Run", (), {"log": lambda self, row, step: logged.append(step)})()
    names = {"steps": 21, "train": lambda step: None, "noise": measured(), "run": found}
    run(after(blocks(PAGE, "diff")[0]), names, PAGE)
    assert logged == [0, 10, 20]


def scalars(folder):
    """All scalars that TensorBoard finds in a folder, by name."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (file,) = folder.rglob("events.out.tfevents.*")
    found = EventAccumulator(str(file)).Reload()
    return {name: found.Scalars(name) for name in found.Tags()["scalars"]}


def test_hugging_faces_reports_have_the_numbers(tmp_path, monkeypatch):
    quiet.importorskip("tensorboard", "torch.utils.tensorboard")
    quiet.importorskip("transformers")
    from tests.integrations.test_transformers import STEPS, make_trainer, token_batches

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    trainer = make_trainer(tmp_path, token_batches(4 * STEPS), options={"report_to": "tensorboard"})
    trainer.train()
    found = scalars(tmp_path / "board")["train/steadygrad/noise_scale/noise_trace"]
    assert [event.step for event in found] == list(range(1, STEPS + 1))
    expected = float(trainer.noise.estimate().noise_trace)
    assert found[-1].value == pytest.approx(expected, rel=1e-6)


def test_lightnings_loggers_have_the_numbers(tmp_path):
    quiet.importorskip("tensorboard", "torch.utils.tensorboard")
    lightning = quiet.importorskip("lightning.pytorch", "lightning.pytorch.loggers")
    quiet.importorskip("transformers")
    from tests.integrations import test_lightning as given

    logger = lightning.loggers.TensorBoardLogger(str(tmp_path))
    callback, module = given.NoiseScaleCallback(), given.Module()
    batches = given.loader(token_batches(given.ACCUMULATION * given.STEPS))
    given.make_trainer(tmp_path, callback, logger=logger).fit(module, batches)
    found = scalars(tmp_path)["steadygrad/noise_scale/noise_trace"]
    assert len(found) == given.STEPS
    expected = float(callback.noise.estimate().noise_trace)
    assert found[-1].value == pytest.approx(expected, rel=1e-6)
