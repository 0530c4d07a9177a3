"""The checkpoint that a task's training begins from: ``Task.start``."""

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.optim import Optimizer

from steadygrad._checks import InputError, shown
from steadygrad.tasks.guard import reason

# Names of the parts of a checkpoint, of which the first that is there is taken.
MODEL = ("model", "model_state_dict", "state_dict")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
# Options of an optimizer that stay the task's own: studies change them with the batch size.
TASKS_OWN = ("lr", "betas", "weight_decay")


def files_of(start: str | Path) -> list[Path]:
    """The files that a checkpoint is read from."""
    path = Path(start).expanduser().absolute() if isinstance(start, (str, Path)) else None
    if path and path.is_file():
        return [path]
    if path and (path / ".metadata").is_file():
        return [path / ".metadata", *sorted(path.glob("*.distcp"))]
    found = sorted(path.glob("model*.safetensors")) if path else []
    if not found:
        raise InputError(
            "Task.start should be a file, or a folder with model.safetensors or a checkpoint of "
            f"torch.distributed, that is there. Found {shown(start)}. Remedy: an absolute path."
        )
    # Of Hugging Face's Trainer, and of Accelerate.
    return found + sorted(found[0].parent.glob("optimizer.[pb]*"))


def digest_of(start: str | Path) -> str:
    """The SHA-256 of a checkpoint's files, one after the other."""
    digest = hashlib.sha256()
    for file in files_of(start):
        with open(file, "rb") as opened:
            while part := opened.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


def read_start(start: str | Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The state of the model, and that of the optimizer where there is one, on the host.

    Raises:
        InputError: If the checkpoint is not there, is damaged or needs pickle.
    """
    files = files_of(start)
    try:
        if files[0].name == ".metadata":
            # Not above: it loads torch.distributed.
            from steadygrad.shards import read_checkpoint

            saved = read_checkpoint(files[0].parent)
        else:
            saved = {}
            for file in files:
                saved |= {"optimizer": _read(file)} if file.stem == "optimizer" else _read(file)
    except Exception as error:
        pickled = re.search(r"nsupported .*?GLOBAL (\S+)", str(error))
        found = f"a pickled {pickled[1]}" if pickled else reason(error)[:99]
        remedy = "torch.save of state_dicts alone, or safetensors" if pickled else "a whole copy"
        remedy = "pip install safetensors" if isinstance(error, ImportError) else remedy
        raise InputError(
            f"Task.start should be a whole checkpoint that needs no pickle. Found {found} in "
            f"{str(start)!r}. Remedy: {remedy}."
        ) from error
    while len(saved) == 1 and isinstance(inner := next(iter(saved.values())), dict):
        saved = inner
    optimizer = next((saved.pop(name) for name in OPTIMIZER if name in saved), None)
    model = next((saved[name] for name in MODEL if isinstance(saved.get(name), dict)), saved)
    # Lightning has a list of them.
    return model, next(iter(optimizer), None) if isinstance(optimizer, list) else optimizer


def _read(file: Path) -> Any:
    if file.suffix != ".safetensors":
        return torch.load(file, map_location="cpu", weights_only=True)
    from safetensors.torch import load_file

    return load_file(file)


def fitting_weights(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state of a model as it takes it: without wrappers' prefixes, with all tied weights.

    Raises:
        InputError: If names or shapes differ.
    """
    state, own = dict(state), model.state_dict()
    for prefix in ("module.", "_orig_mod."):
        consume_prefix_in_state_dict_if_present(state, prefix)
    named = [*model.named_parameters(remove_duplicate=False)]
    kept = {id(p): state[name] for name, p in named if name in state}
    state = {name: kept[id(p)] for name, p in named if id(p) in kept} | state
    _check(own, state, "the weights of the model that Task.make_model makes")
    return state


def fitting_optimizer(
    state: Any, model: nn.Module, optimizer: Optimizer, *, by_name: bool
) -> dict[str, Any]:
    """The state of an optimizer for this one, by parameters' names or by their numbers.

    Raises:
        InputError: If the groups' numbers of parameters differ.
    """
    new = optimizer.state_dict()["param_groups"]
    try:
        groups, values = state["param_groups"], state["state"]
        groups = [groups[number] for number in range(len(groups))]
        ids = [str(one) for group in groups for one in group["params"]]
    except (TypeError, KeyError):
        groups, values, ids = [], {}, []
    sizes, found = ([len(group["params"]) for group in x] for x in (new, groups))
    if sizes != found:
        raise InputError(
            f"Task.start should hold the state of an optimizer with groups of {sizes} parameters, "
            f"as Task.make_optimizer makes them. Found {found}. Remedy: make_optimizer as in that "
            "training, or a file of the weights alone."
        )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    # Saved by name, or by number in the order of that optimizer.
    places = order if {*ids} == {*order} else ids
    keys: list[Any] = order if by_name else [*range(len(order))]
    key_of = dict(zip(places, keys, strict=True))
    return {
        "state": {key_of[str(one)]: own for one, own in values.items()},
        "param_groups": [
            {
                **{n: x if n in TASKS_OWN else old.get(n, x) for n, x in group.items()},
                "params": [keys[number] for number in group["params"]],
            }
            for group, old in zip(new, groups, strict=True)
        ],
    }


def check_optimizer_state(state: Mapping[Any, Any], made: Mapping[Any, Any]) -> None:
    """Compares an optimizer's state, by names and shapes, with one that a step has made."""
    # An optimizer that makes none, such as plain SGD, has no use for any.
    both = [one for one in made or state if one in state]
    own, found = (
        {f"{n} of {one}": x for one in both for n, x in s.get(one, {}).items()}
        for s in (made, state)
    )
    _check(own, found, "the state of the optimizer that Task.make_optimizer makes")


def _check(own: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
    shapes = [{n: tuple(getattr(x, "shape", ())) for n, x in one.items()} for one in (own, found)]
    wrong = [name for name in {**own, **found} if shapes[0].get(name) != shapes[1].get(name)]
    if wrong:
        here, there = (one.get(wrong[0], "missing") for one in shapes)
        raise InputError(
            f"Task.start should hold {what}. Found {len(wrong)} names or shapes that differ, the "
            f"first {wrong[0]!r}: {there} in it, {here} here. Remedy: make it as in that training."
        )
