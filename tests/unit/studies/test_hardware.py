"""The header says what a study ran on."""

from types import SimpleNamespace

import torch

from steadygrad.record import environment
from steadygrad.studies.advise import Settings, Stop
from steadygrad.studies.advise.header import make_header
from steadygrad.studies.engine import Engine
from steadygrad.studies.hardware import accelerator
from steadygrad.studies.ranks import Ranks
from tests.unit.tasks.tiny import TASK

GPU = SimpleNamespace(name="X100", total_memory=2**36)


def header_on(device):
    engine = Engine(TASK, seed=0, dtype="float32", ranks=Ranks(Stop()))
    engine.ranks.device = torch.device(device)
    return make_header(Settings(), engine, SimpleNamespace(as_dict=dict))


def test_a_gpu_is_named_in_the_header(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: asked.append(d) or GPU)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    expected = {"gpu": "X100", "gpu_memory_bytes": 2**36, "cuda": "12.8"}
    assert header_on("cuda:1")["environment"] == {**environment(), **expected}
    assert asked == [torch.device("cuda", 1)]


def test_without_a_gpu_there_is_nothing_to_say():
    assert accelerator(torch.device("cpu")) == {}
    assert header_on("cpu")["environment"] == environment()
