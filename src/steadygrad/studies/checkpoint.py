"""States of training on disk: tensors as safetensors, everything else as JSON; no pickle.

The JSON file names the tensors' digest and is renamed into place after them: a checkpoint is whole,
or it does not exist.
"""

import hashlib
import json
from pathlib import Path
from shutil import rmtree
from typing import Any

from torch import Tensor

from steadygrad._checks import InputError
from steadygrad.record import replace_file
from steadygrad.studies.engine import State

__all__ = ["Checkpoints"]


class Checkpoints:
    """The checkpoints of one run.

    Args:
        folder: The run's folder.

    Raises:
        InputError: If safetensors is not installed.
    """

    def __init__(self, folder: Path) -> None:
        try:
            import safetensors.torch as safetensors
        except ModuleNotFoundError as error:
            raise InputError(
                "Checkpoints need the package safetensors. Found none. "
                'Remedy: pip install "steadygrad[cli]".'
            ) from error
        self._folder = folder / "checkpoints"
        self._safetensors = safetensors

    def save(self, number: int, state: State) -> None:
        """Writes a checkpoint; an older one of the same number stays until it is whole."""
        tensors: dict[str, Tensor] = {}
        plain = _strip(vars(state), "state", tensors)
        data = self._safetensors.save(tensors)
        text = json.dumps({"sha256": hashlib.sha256(data).hexdigest(), "state": plain})
        self._folder.mkdir(exist_ok=True)
        replace_file(self._path(number, "safetensors"), data)
        replace_file(self._path(number, "json"), text.encode())

    def load(self, number: int) -> State | None:
        """Reads a checkpoint; None if it is missing or damaged."""
        try:
            described = json.loads(self._path(number, "json").read_bytes())
            data = self._path(number, "safetensors").read_bytes()
            if hashlib.sha256(data).hexdigest() != described["sha256"]:
                return None
            return State(**_restore(described["state"], self._safetensors.load(data)))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def drop(self, number: int) -> None:
        """Deletes one of them."""
        for kind in ("json", "safetensors"):
            self._path(number, kind).unlink(missing_ok=True)

    def remove(self) -> None:
        """Deletes all of them."""
        rmtree(self._folder, ignore_errors=True)

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"point-{number}.{kind}"


def _strip(nest: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """The nest as JSON, its tensors moved to ``tensors`` under the names left in their place."""
    if isinstance(nest, Tensor):
        # Own memory for each: safetensors refuses shared ones, such as tied weights.
        tensors[name] = nest.detach().cpu().contiguous().clone()
        return {"tensor": name}
    if isinstance(nest, dict):
        items = enumerate(nest.items())
        return {"dict": [[key, _strip(item, f"{name}.{i}", tensors)] for i, (key, item) in items]}
    if isinstance(nest, (list, tuple)):
        kind = "tuple" if isinstance(nest, tuple) else "list"
        return {kind: [_strip(item, f"{name}.{i}", tensors) for i, item in enumerate(nest)]}
    if nest is None or isinstance(nest, (bool, int, float, str)):
        return {"plain": nest}
    raise InputError(
        "The optimizer's state should hold tensors, numbers and strings. "
        f"Found {type(nest).__name__}. Remedy: an optimizer whose state_dict can be saved."
    )


def _restore(nest: dict[str, Any], tensors: dict[str, Tensor]) -> Any:
    ((kind, value),) = nest.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _restore(item, tensors) for key, item in value}
    if kind == "plain":
        return value
    items = [_restore(item, tensors) for item in value]
    return tuple(items) if kind == "tuple" else items
