"""States of training: copies in the host's memory, and files that no pickle can hide in."""

import copy
import hashlib
import io
import os
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.record import replace_file
from steadygrad.sharding import load_model_state, load_optimizer_state, whole_states

if TYPE_CHECKING:
    from steadygrad.studies.trainer import Trainer

__all__ = ["Checkpoints", "State", "full_state", "load_full_state"]


@dataclass
class State:
    """All that training goes on from: nests of tensors and plain values, on the host.

    Attributes:
        model: The model's ``state_dict``.
        optimizer: The optimizer's ``state_dict``.
        scaler: The gradient scaler's ``state_dict``; empty unless training in float16.
        samples: Samples seen.
        steps: Optimizer steps taken.
    """

    model: dict[str, Any]
    optimizer: dict[str, Any]
    scaler: dict[str, Any]
    samples: int = 0
    steps: int = 0

    @classmethod
    def of(cls, trainer: "Trainer", samples: int) -> "State":
        """Copies the state of a trainer; whole tensors, also of a sharded model."""
        if trainer.context.sharding == "fsdp2":
            # Every rank needs the whole of it: the file is written by one and read by all.
            model, optimizer = whole_states(trainer.model, trainer.optimizer)
        else:
            model, optimizer = trainer.model.state_dict(), trainer.optimizer.state_dict()
        model, optimizer, scaler = map(_on_host, (model, optimizer, trainer.scaler.state_dict()))
        return cls(model, optimizer, scaler, samples, trainer.steps)

    def check(self) -> None:
        """Checks that the state can be written and read again.

        Raises:
            InputError: If it holds anything but tensors, numbers, texts and nests of them.
        """
        try:
            _unpack(_pack(self, ""))
        except Exception as error:
            raise InputError(
                "The optimizer's state should hold tensors, numbers and strings. Found "
                f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}. "
                "Remedy: an optimizer whose state_dict can be saved and read without pickle."
            ) from error


def full_state(model: nn.Module) -> dict[str, Any]:
    """The ``state_dict`` of a model that is not sharded, on the host."""
    found: dict[str, Any] = _on_host(model.state_dict())
    return found


def load_full_state(trainer: "Trainer", state: State, *, model_only: bool = False) -> None:
    """Puts a trainer's model, or its optimizer and scaler, into a state.

    Args:
        trainer: The trainer.
        state: The state; it is not changed.
        model_only: The model, instead of the optimizer and the scaler.
    """
    if not model_only:
        trainer.scaler.load_state_dict(copy.deepcopy(state.scaler))
    sharded = trainer.context.sharding == "fsdp2"
    if model_only and sharded:
        load_model_state(trainer.model, state.model)
    elif model_only:
        trainer.model.load_state_dict(state.model)
    elif sharded:
        load_optimizer_state(trainer.model, trainer.optimizer, state.optimizer)
    else:
        trainer.optimizer.load_state_dict(copy.deepcopy(state.optimizer))


def _on_host(nest: Any) -> Any:
    if isinstance(nest, Tensor):
        # A copy of its own: the step that follows changes the original in place.
        return nest.detach().to("cpu", copy=True)
    if isinstance(nest, dict):
        return {key: _on_host(item) for key, item in nest.items()}
    if isinstance(nest, (list, tuple)):
        return type(nest)(_on_host(item) for item in nest)
    return copy.deepcopy(nest)


class Checkpoints:
    """The checkpoints of one run: one file each, with its name and its SHA-256.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "checkpoints"
        self._last: tuple[str, State] | None = None

    def save(self, name: str, state: State) -> None:
        """Writes a checkpoint; an older one of the same name stays until it is whole.

        Raises:
            InputError: If it cannot be written.
        """
        self._last = name, state
        if not self._folder.is_dir():
            try:
                self._folder.mkdir(exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"Expected a folder for checkpoints at {str(self._folder)!r}. Found "
                    f"{error.strerror}. Remedy: remove what is in its place."
                ) from error
        path = self._path(name)
        # Two workers that miss the same checkpoint may write it at the same time.
        part = path.with_name(f"{name}-{uuid4().hex}")
        replace_file(part, _pack(state, name))
        try:
            if path.is_dir():
                rmtree(path)
            os.replace(part, path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise InputError(
                f"Expected a checkpoint at {str(path)!r}. Found {error.strerror}. "
                "Remedy: remove what is in its place."
            ) from error

    def load(self, name: str, samples: int) -> State | None:
        """Reads a checkpoint.

        Args:
            name: Its name.
            samples: Samples that training must have seen there.

        Returns:
            The state; None if the file is missing, damaged, or of another moment of training.
        """
        if self._last is not None and self._last[0] == name:
            return self._last[1]
        try:
            found, state = _unpack(self._path(name).read_bytes())
        except Exception:  # whatever a damaged file makes torch raise
            return None
        if found != name or state.samples != samples:
            return None
        self._last = name, state
        return state

    def drop(self, name: str) -> None:
        """Deletes one of them."""
        self._path(name).unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes all of them."""
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
