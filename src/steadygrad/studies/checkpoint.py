"""Training states: copies in host memory, and files that are read with `weights_only=True`."""

import copy
import hashlib
import io
from dataclasses import dataclass, field
from pathlib import Path
from shutil import rmtree
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from steadygrad._files import read_file
from steadygrad.studies.folder import replace_file, writing
from steadygrad.tasks.guard import guarded

# Bytes of a checkpoint.
LARGEST = 1 << 40


@dataclass
class State:
    """All that training continues from: nests of tensors and plain values, on the host.

    Attributes:
        optimizer: Its ``state_dict``; empty where a new one begins.
        scaler: The gradient scaler's ``state_dict``; empty unless training in float16.
        samples: Samples seen.
        steps: Optimizer steps taken.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any] = field(default_factory=dict)
    scaler: dict[str, Any] = field(default_factory=dict)
    samples: int = 0
    steps: int = 0

    @guarded("Saving and reading the state_dict of model and optimizer, without pickle,")
    def reread(self) -> "State":
        """The state as it is once it was written and read again."""
        return _unpack(_pack(self, ""))[1]


def on_host(nest: Any) -> Any:
    """A copy of a nest of dictionaries, lists and tensors in the host's memory."""

    def copied(leaf: Any) -> Any:
        # A copy of its own: the step that follows changes the original in place.
        is_tensor = isinstance(leaf, Tensor)
        return leaf.detach().to("cpu", copy=True) if is_tensor else copy.deepcopy(leaf)

    return tree_map(copied, nest)


class Checkpoints:
    """The checkpoints in a run's folder: one file each, with its name, its SHA-256 and the run.

    Those of another run, by its identifier ``run``, are ignored.
    """

    def __init__(self, folder: Path, run: str = "") -> None:
        self._folder, self._run = folder / "checkpoints", run

    def save(self, name: str, state: State) -> None:
        """Writes a checkpoint; an older one of the same name stays until it is whole."""
        with writing(self._folder):
            self._folder.mkdir(exist_ok=True)
        replace_file(self._path(name), _pack(state, f"{name} {self._run}"))

    def load(self, name: str, samples: int) -> State | None:
        """Reads a checkpoint; None if it is missing, damaged, another run's or at other samples."""
        try:
            found, state = _unpack(read_file(self._path(name), LARGEST))
        except Exception:  # whatever a damaged file makes torch raise
            return None
        mine = found == f"{name} {self._run}" and state.samples == samples
        return state if mine else None

    def drop(self, name: str) -> None:
        """Deletes one of them."""
        self._path(name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes all of them."""
        if self._folder.is_dir():  # rmtree would wait for a pipe
            rmtree(self._folder, ignore_errors=True)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.pt"


def _pack(state: State, name: str) -> bytes:
    file = io.BytesIO()
    torch.save({"name": name, **vars(state)}, file)
    data = file.getvalue()
    return hashlib.sha256(data).digest() + data


def _unpack(data: bytes) -> tuple[str, State]:
    digest, data = data[:32], data[32:]
    if hashlib.sha256(data).digest() != digest:
        raise ValueError("the checksum is wrong")
    fields = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    return fields.pop("name"), State(**fields)
