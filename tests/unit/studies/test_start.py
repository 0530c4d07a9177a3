"""``Task.start``: every run of a study begins where a training stands."""

import argparse
import copy
import gc
import json
import math
import os
import pickle
import sys
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import SGD, AdamW

from steadygrad._checks import InputError
from steadygrad.studies.folder import read_run
from steadygrad.studies.trainer import Trainer
from steadygrad.tasks import TaskError
from steadygrad.tasks.start import digest_of, files_of, fitting_weights, read_start
from tests.refusals import refused
from tests.unit.studies import framework
from tests.unit.studies.framework import begin, make_trainer, part, weights, worst
from tests.unit.studies.tiny_task import losses, mean, without_dropout
from tests.unit.test_states import damaged

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
    # Is not read: of another model, and of an earlier checkpoint.
    for name in ("model_1.safetensors", "model-00001-of-00002.safetensors", "optimizer.pth"):
        (path / name).write_bytes(b"other")


def indexed(training, path):
    """Weights in two files, in a cache of Hugging Face's hub, where they are links."""
    save = pytest.importorskip("safetensors.torch", reason="comes with transformers").save_file
    blobs, folder = path / "blobs", path / "snapshots" / "main"
    for each in (blobs, folder):
        each.mkdir(parents=True)
    model, optimizer = training.states
    names = [*model]
    shards = {"b.safetensors": names[:1], "a.safetensors": names[1:]}
    for number, (file, some) in enumerate(shards.items()):
        save({name: model[name] for name in some}, blobs / f"{number}")
        (folder / file).symlink_to(f"../../blobs/{number}")
    found = {name: file for file, some in shards.items() for name in some}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": found}))
    (folder / "model_1.safetensors").write_bytes(b"other")
    torch.save(optimizer, folder / "optimizer.bin")
    return folder


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
    [
        *[plain, recipe, lightning, numbered, named, hugging_face, indexed, accelerate],
        *[bare, safetensors],
    ],
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


def test_a_state_that_is_checked_does_not_stay_beside_the_next_one(tmp_path, monkeypatch):
    """A device may have room for one."""
    trainer, alive, restart = begun(tmp_path / "saved"), [], Trainer.restart

    def watched(self):
        states = [weakref.ref(x) for own in self.optimizer.state.values() for x in own.values()]
        restart(self)
        gc.collect()
        alive.append((len(states), sum(state() is not None for state in states)))

    monkeypatch.setattr(Trainer, "restart", watched)
    trainer.check_task()
    assert [left for made, left in alive if made] == [0, 0]


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
        (lambda training, path: path.parent, AdamW, "model.safetensors.index.json"),
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


def state(number, name, change):
    return lambda m, o: o["state"][number].update({name: change(o["state"][number][name])})


def group(**options):
    return lambda m, o: o["param_groups"][0].update(options)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda m, o: m.update({3: torch.ones(1)}), "3, of type Tensor"),
        (lambda m, o: m.update({"0.bias": m}), "'0.bias', of type OrderedDict"),
        (lambda m, o: m["0.weight"].fill_(math.nan), "'0.weight', not finite"),
        (lambda m, o: m.update({"0.bias": m["0.bias"].long()}), "whole numbers in it"),
        (lambda m, o: m.update({"0.bias": m["0.bias"].cfloat()}), "complex in it"),
        (lambda m, o: m.update({"0.bias": m["0.bias"].double() + 1e300}), "'0.bias', not finite"),
        (state(0, "exp_avg", lambda x: x.double() + 1e300), "'exp_avg of 0', not finite"),
        (state(0, "exp_avg", lambda x: x * math.inf), "'exp_avg of 0', not finite"),
        (state(1, "exp_avg_sq", lambda x: x.neg()), "'exp_avg_sq of 1', negative"),
        (state(1, "exp_avg_sq", lambda x: x.long()), "'exp_avg_sq of 1': (16,), whole numbers"),
        (state(2, "exp_avg", lambda x: x.cfloat()), "'exp_avg of 2': (1, 16), complex"),
        (state(2, "exp_avg", lambda x: {"a": x}), "'exp_avg of 2': dict"),
        (group(maximize=True), "maximize = [False]"),
        (group(eps=math.nan), "'eps of a group'"),
        (group(params=[0, 0, 1, 2]), "states of 1 others"),
        (lambda m, o: o["state"].update({9: {}}), "states of 1 others"),
        (lambda m, o: o["state"].pop(1), "'step of 1': missing"),
        (lambda m, o: o.update(state=[1]), "TypeError"),
        (lambda m, o: o.update(param_groups=torch.ones(1, 2)), "TypeError"),
    ],
)
def test_foreign_shapes_and_values_are_refused(tmp_path, change, found):
    saved = dict(zip(("model", "optimizer"), copy.deepcopy(Training(AdamW).states), strict=True))
    change(*saved.values())
    torch.save(saved, tmp_path / "saved")
    with refused("Task.start", found, "Remedy"):
        begun(tmp_path / "saved", lambda *_: None, make_optimizer=AdamW).check_task()


def test_what_is_no_state_and_a_dictionary_in_itself(tmp_path):
    itself = {}
    itself["a"] = {"b": itself}
    for saved in (itself, {"optimizer": torch.ones(3)}, [torch.ones(3)], torch.ones(2)):
        torch.save(saved, tmp_path / "saved")
        with refused("Task.start"):
            read_start(tmp_path / "saved")


def test_running_statistics_are_checked_and_no_other_buffers():
    model = nn.BatchNorm1d(1)
    model.register_buffer("mask", torch.tensor([-math.inf]))
    for name, value in (("mean", math.inf), ("mean", 1e300), ("var", math.nan), ("var", -5.0)):
        saved = fitting_weights(model.state_dict(), model)
        saved[f"running_{name}"] = torch.tensor([value], dtype=torch.float64)
        with refused("Task.start", f"running_{name}"):
            fitting_weights(saved, model)


def test_how_a_step_is_computed_is_the_tasks_own(tmp_path):
    training, how = Training(AdamW), ("capturable", "foreach", "fused", "differentiable")
    training.optimizer.param_groups[0].update(dict.fromkeys(how, True))
    begun(tmp_path / "saved", plain, training, make_optimizer=AdamW).check_task()
    for broken in ({"amsgrad": True}, {"amsgrad": False, "eps": "foo"}):
        training.optimizer.param_groups[0].update(broken)
        with refused("with Task.start's state", kind=TaskError):
            begun(tmp_path / "saved", plain, training, make_optimizer=AdamW).check_task()


def test_tied_weights_that_differ_are_refused():
    model = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
    apart = copy.deepcopy(model.state_dict())
    model[1].weight = model[0].weight
    with refused("tied", "0.weight"):
        fitting_weights(apart, model)


# Files of torch.distributed.checkpoint


def moved(**fields):
    return lambda whole, of: vars(of["model.0.weight"]).update(fields)


def twice(whole, of):
    """As many elements as it has, and half of them not there."""
    whole.size, whole.chunks = (32, 8), whole.chunks * 2


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("edit", "found"),
    [
        (lambda whole, of: whole.chunks.clear(), "'model.0.weight' in chunks"),
        (lambda whole, of: setattr(whole, "size", (1 << 40, 8)), "'model.0.weight' in chunks"),
        (lambda whole, of: setattr(whole.properties, "dtype", torch.half), "in chunks"),
        (lambda whole, of: vars(whole.chunks[0]).update(sizes=(8, 8)), "in chunks"),
        (twice, "'model.0.weight' in chunks"),
        (lambda whole, of: whole.chunks.extend(whole.chunks), "'model.0.weight' in chunks"),
        (lambda whole, of: vars(of["model.0.bias"]).update(vars(of["model.2.bias"])), "one place"),
        (moved(length=-1), "EOFError"),
        (moved(relative_path="../other.distcp"), "regular files"),
        (moved(relative_path="pipe"), "regular files"),
        (moved(relative_path=7), "TypeError"),
    ],
)
def test_what_is_stored_is_each_element_once_in_files_of_the_folder(tmp_path, edit, found):
    numbered(Training(), tmp_path / "saved")
    (tmp_path / "other.distcp").write_bytes((tmp_path / "saved" / "__0_0.distcp").read_bytes())
    os.mkfifo(tmp_path / "saved" / "pipe")
    layout = pickle.loads((tmp_path / "saved" / ".metadata").read_bytes())
    stored = {key.fqn: value for key, value in layout.storage_data.items()}
    edit(layout.state_dict_metadata["model.0.weight"], stored)
    (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(layout))
    with refused("Task.start", found):
        read_start(tmp_path / "saved")


@pytest.mark.parametrize("name", [".metadata", "model.safetensors", "model.safetensors.index.json"])
def test_what_is_no_regular_file_in_the_folder_is_not_read(tmp_path, name):
    (tmp_path / "elsewhere").write_text('{"weight_map": {}}')
    for number, place in enumerate(("pipe", "/dev/zero", tmp_path / "elsewhere")):
        path = tmp_path / f"{number}" / name
        path.parent.mkdir()
        os.mkfifo(path) if place == "pipe" else path.symlink_to(place)
        for read in (digest_of, read_start):
            with refused("Task.start"):
                read(path.parent)


def test_a_folder_of_two_checkpoints_is_refused(tmp_path):
    for name in ("model.safetensors", "optimizer.pt", "optimizer.bin"):
        (tmp_path / name).write_bytes(b"")
    with refused("one checkpoint", "optimizer.pt and optimizer.bin"):
        files_of(tmp_path)


@pytest.mark.filterwarnings("ignore")  # as of a complex number whose one half is left
def test_a_damaged_checkpoint_is_refused_or_loaded_as_it_is(tmp_path):
    saved, loaded = dict(zip(("model", "optimizer"), Training().states, strict=True)), 0
    for what, state in islice(damaged(saved), 0, None, 13):
        torch.save(state, tmp_path / "saved")
        with suppress(InputError):
            trainer = begun(tmp_path / "saved", lambda *_: None)
            trainer.check_task()
            trainer.restart()
            loaded += 1
            pairs = [(trainer.model.state_dict(), state["model"])]
            for number, found in trainer.optimizer.state_dict()["state"].items():
                pairs.append((found, state["optimizer"]["state"][number]))
            for found, own in pairs:
                for name, value in found.items():
                    assert torch.equal(value, torch.as_tensor(own[name]).to(value.dtype)), what
    assert loaded


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
        "from tests.unit.studies.tiny_task import mean, without_dropout\n"
        f"def make(): return replace(without_dropout(), start={str(path)!r}, evaluate=mean)\n"
    )
    monkeypatch.setattr(framework, "tiny", lambda factory: spec)
    monkeypatch.setattr(sys, "path", [*sys.path])
    begin(tmp_path / "run", at=1)
    part(tmp_path / "run", 1)
    first = read_run(tmp_path / "run").header.first_value
    assert first == pytest.approx(mean(Training().model.requires_grad_(False), TASK.valid))
    lightning(Training(), path)  # the same numbers in another file
    with refused("Task.start as it was"):
        part(tmp_path / "run", 1)
