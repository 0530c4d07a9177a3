"""``Task.start``: every run of a study begins where a training stands."""

import argparse
import os
import pickle
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, AdamW

from tests.refusals import refused
from tests.unit.studies import framework
from tests.unit.studies.framework import begin, make_trainer, part, weights, worst
from tests.unit.studies.tiny_task import losses, without_dropout

TASK = without_dropout()
# Another rate, other betas and another decay than the training's: those of the task hold.
make_optimizer = partial(AdamW, betas=(0.8, 0.99), weight_decay=0.1, eps=1e-6)
earlier = partial(AdamW, betas=(0.9, 0.95), eps=1e-3)


class Training:
    """A plain loop."""

    def __init__(self, make=earlier):
        torch.manual_seed(7)
        self.model = TASK.make_model()
        self.optimizer = make(self.model.parameters(), lr=0.01)
        self.go_on(0, 10)

    def go_on(self, first, last):
        for number in range(first, last):
            batch = TASK.train.batch(torch.arange(4 * number, 4 * number + 4))
            losses(self.model, batch).mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()

    @property
    def states(self):
        return self.model.state_dict(), self.optimizer.state_dict()


def saver(layout):
    """Saves what a layout makes of the states of a model and an optimizer."""

    def save(training, path):
        torch.save(layout(*training.states), path)

    return save


bare = saver(lambda model, optimizer: model)
plain = saver(lambda model, optimizer: {"model": model, "optimizer": optimizer, "step": 10})
lightning = saver(lambda model, optimizer: {"state_dict": model, "optimizer_states": [optimizer]})
pickled = saver(lambda model, optimizer: {"model": model, "args": argparse.Namespace()})


@saver
def recipe(model, optimizer):
    """Of a compiled model."""
    model = {f"_orig_mod.{name}": value for name, value in model.items()}
    return {"epoch": 1, "model_state_dict": model, "optimizer_state_dict": optimizer}


def numbered(training, path):
    model, optimizer = training.states
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path, no_dist=True)


def named(training, path):
    """As in torch's recipe, of an optimizer that had its parameters in another order."""
    model, optimizer = get_state_dict(training.model, training.optimizer)
    optimizer["param_groups"][0]["params"].reverse()
    dcp.save({"app": {"model": model, "optim": optimizer}}, checkpoint_id=path, no_dist=True)


def safetensors(training, path):
    save = pytest.importorskip("safetensors.torch", reason="comes with transformers").save_file
    save(training.model.state_dict(), path.with_suffix(".safetensors"))
    return path.with_suffix(".safetensors")


def hugging_face(training, path):
    path.mkdir()
    safetensors(training, path / "model")
    torch.save(training.optimizer.state_dict(), path / "optimizer.pt")
    torch.save([training], path / "trainer_state.pt")  # is not read


def accelerate(training, path):
    hugging_face(training, path)
    (path / "optimizer.pt").rename(path / "optimizer.bin")


def begun(path, save=plain, training=None, **changes):
    """A trainer that begins from a checkpoint of a training."""
    path = save(training or Training(), path) or path
    return make_trainer(replace(TASK, start=path, **{"make_optimizer": make_optimizer, **changes}))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    "save",
    [plain, recipe, lightning, numbered, named, hugging_face, accelerate, bare, safetensors],
)
def test_every_run_goes_on_from_the_checkpoint(tmp_path, save):
    """As the training itself would, at the task's rate, betas and decay, and the same each time."""
    alone, training = save in (bare, safetensors), Training()
    trainer = begun(tmp_path / "saved", save, training)
    if alone:
        training.optimizer = make_optimizer(training.model.parameters(), lr=0.001)
    training.optimizer.param_groups[0].update(lr=0.001, betas=(0.8, 0.99), weight_decay=0.1)
    before = weights(training)
    training.go_on(10, 13)
    trainer.check_task()
    for repeat in (0, 1):
        trainer.restart(repeat)
        assert worst(weights(trainer), before) == trainer.steps == 0
        group = trainer.optimizer.param_groups[0]
        assert (group["eps"], group["lr"]) == (1e-6 if alone else 1e-3, 0.001)
        for number in range(10, 13):
            trainer.step(torch.arange(4 * number, 4 * number + 4))
        assert worst(weights(trainer), weights(training)) == 0


def test_another_optimizer_begins_without_the_state(tmp_path):
    """As those that `compare` puts in its place."""
    trainer = begun(tmp_path / "saved")
    trainer.task = replace(trainer.task, make_optimizer=partial(SGD, momentum=0.9))
    trainer.restart()
    assert trainer.optimizer.state_dict()["state"] == {}
    assert worst(weights(trainer), weights(Training())) == 0


def test_weights_under_one_name_are_tied_ones(tmp_path):
    """safetensors keeps one of the names."""

    def make_model():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        model[1].weight = model[0].weight
        return model

    saved = make_model().state_dict()
    del saved["0.weight"]
    torch.save(saved, tmp_path / "saved")
    trainer = make_trainer(replace(TASK, start=tmp_path / "saved", make_model=make_model))
    assert torch.equal(trainer.model[0].weight, saved["1.weight"])


def test_a_model_with_a_seed_of_its_own_may_begin_from_a_checkpoint(tmp_path):
    def make_model():
        torch.manual_seed(0)
        return TASK.make_model()

    begun(tmp_path / "saved", make_model=make_model).check_task()


class Code:
    def __reduce__(self):
        return os.putenv, ("STEADYGRAD_RAN", "1")


def with_code(training, path):
    numbered(training, path)
    (path / ".metadata").write_bytes(pickle.dumps(Code()))


def cut(save, training, path):
    save(training, path)
    longest = max(path.iterdir() if path.is_dir() else [path], key=lambda x: x.stat().st_size)
    os.truncate(longest, 100)


@saver
def smaller(model, optimizer):
    model["0.weight"] = model["0.weight"][:, 1:]
    del model["2.bias"]
    return model


@saver
def larger(model, optimizer):
    optimizer["state"][2]["exp_avg"] = torch.ones(2, 16)
    return {"model": model, "optimizer": optimizer}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("save", "make", "found"),
    [
        (lambda training, path: path.parent / "none", AdamW, "absolute path"),
        (lambda training, path: path.parent, AdamW, "model.safetensors"),
        (smaller, AdamW, "2 names or shapes that differ, the first '0.weight': (16, 7)"),
        (plain, partial(SGD, momentum=0.9), "16 names or shapes"),
        (larger, AdamW, "'exp_avg of 2': (2, 16)"),
        (pickled, AdamW, "argparse.Namespace"),
        (with_code, AdamW, f"{os.name}.putenv"),
        (partial(cut, plain), AdamW, "failed finding central directory"),
        (partial(cut, numbered), AdamW, "EOFError"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path, save, make, found):
    with refused("Task.start", found, "Remedy"):
        begun(tmp_path / "saved", save, Training(make)).check_task()


def test_a_state_that_the_optimizer_has_no_use_for_is_refused(tmp_path):
    trainer = begun(tmp_path / "saved", plain, Training(AdamW), make_optimizer=SGD)
    with refused("Task.start", "'step of 0'"):
        trainer.check_task()


def test_a_run_goes_on_from_its_own_checkpoint_alone(tmp_path, monkeypatch):
    """A training that goes on may write it anew; workers look, too, as they load the task."""
    path, spec = tmp_path / "saved", str(tmp_path / "task.py:make")
    plain(Training(), path)
    (tmp_path / "task.py").write_text(
        "from dataclasses import replace\n"
        "from tests.unit.studies.tiny_task import without_dropout\n"
        f"def make(): return replace(without_dropout(), start={str(path)!r})\n"
    )
    monkeypatch.setattr(framework, "tiny", lambda factory: spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    begin(tmp_path / "run", at=1000)
    part(tmp_path / "run", 1)
    lightning(Training(), path)  # the same numbers in another file
    with refused("Task.start as it was"):
        part(tmp_path / "run", 1)
