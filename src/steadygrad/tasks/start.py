"""The checkpoint that training begins from, ``Task.start``; one that cannot is an InputError."""

import hashlib
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadygrad._checks import InputError, shown
from steadygrad._files import read_json
from steadygrad.tasks.check import reason

# Names of the parts of a checkpoint, of which the first that is there is taken.
MODEL = ("model", "model_state_dict", "state_dict")
OPTIMIZER = ("optimizer", "optim", "optimizer_state_dict", "optimizer_states")
# Lists of a checkpoint's files: of torch.distributed, and of weights in several files.
LAYOUT, INDEX = ".metadata", "model.safetensors.index.json"
# Weights and states of Hugging Face's Trainer, and of Accelerate.
WEIGHTS, STATES = ("model.safetensors", INDEX), ("optimizer.pt", "optimizer.bin")
# Options that stay the task's own: studies change them, or they say how a step is computed.
TASKS_OWN = ("lr", "betas", "weight_decay", "capturable", "foreach", "fused", "differentiable")
# Buffers of normalizations; others may hold infinities, as masks do.
RUNNING = ("running_mean", "running_var", "num_batches_tracked")
# States and buffers that are counts, squares, or sums of squares.
NEVER_NEGATIVE = re.compile(r"(step|\w*sq\w*|sum|\w*var|acc_delta|exp_inf) of |.*(g_var|_tracked)$")


def _wrong(expected: str, found: str, remedy: str) -> InputError:
    return InputError(f"Task.start should {expected}. Found {found}. Remedy: {remedy}.")


@contextmanager
def _reading() -> Iterator[None]:
    """Turns whatever a foreign checkpoint makes its reader raise into one line."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        pickled = re.search(r"nsupported .*?GLOBAL (\S+)", str(error))
        found = f"a pickled {pickled[1]}" if pickled else reason(error)[:99]
        remedy = "torch.save of state_dicts alone, or safetensors" if pickled else "a whole copy"
        remedy = "pip install safetensors" if isinstance(error, ImportError) else remedy
        raise _wrong("be a whole checkpoint, of state_dicts alone", found, remedy) from error


@_reading()
def files_of(start: str | Path) -> list[Path]:
    """The files that a checkpoint is read from, by its writer's own list."""
    path = Path(start).expanduser().absolute() if isinstance(start, (str, Path)) else None
    if path and path.is_file():
        return [path]
    if not path or not (files := [path / name for name in _listed(path)]):
        expected = f"be a file, or a folder with {LAYOUT} or {' or '.join(WEIGHTS)}, that is there"
        raise _wrong(expected, shown(start), "an absolute path")
    home = path.resolve()
    # In a cache of Hugging Face's hub files are links.
    homes = [home, home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [home]
    for file in files:
        real = file.resolve()
        if not real.is_file() or not any(map(real.is_relative_to, homes)):
            raise _wrong("be a folder with regular files in it", f"{str(file)!r}", "a whole copy")
    return files


def _listed(folder: Path) -> list[str]:
    if (folder / LAYOUT).exists():
        # Not above: it loads torch.distributed.
        layout = import_module("steadygrad.shards").read_layout(folder / LAYOUT)
        return [LAYOUT, *sorted({part.relative_path for part in layout.storage_data.values()})]
    weights, states = ([x for x in names if (folder / x).exists()] for names in (WEIGHTS, STATES))
    for names in (weights, states):
        if len(names) > 1:
            raise _wrong("be a folder of one checkpoint", " and ".join(names), "remove the older")
    shards = read_json(folder / INDEX)["weight_map"].values() if weights == [INDEX] else ()
    return [*weights, *sorted({*shards}), *states] if weights else []


def _joined(files: list[Path]) -> dict[Any, Any]:
    """The content of a checkpoint's files, with an optimizer's file under the name of its own."""
    saved: dict[Any, Any] = {}
    if files[0].name == LAYOUT:
        saved, files = import_module("steadygrad.shards").read_checkpoint(files[0].parent), []
    for file in (file for file in files if file.name != INDEX):
        if file.suffix == ".safetensors":
            found = import_module("safetensors.torch").load_file(file)
        else:
            found = torch.load(file, map_location="cpu", weights_only=True)
        found = {"optimizer": found} if file.name in STATES else found
        if not saved.keys().isdisjoint(found):
            raise ValueError(f"{shown(next(iter(saved.keys() & found)))} in two files")
        saved |= found
    return saved


@_reading()
def digest_of(start: str | Path) -> str:
    """The SHA-256 of a checkpoint's files, one after the other."""
    digest = hashlib.sha256()
    for file in files_of(start):
        with open(file, "rb") as opened:
            while part := opened.read(1 << 24):
                digest.update(part)
    return digest.hexdigest()


@_reading()
def read_start(start: str | Path) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """The state of the model, and that of the optimizer where there is one, on the host."""
    saved = _joined(files_of(start))
    # Not for ever, where one holds itself.
    for _ in range(8):
        if len(saved) == 1 and isinstance(inner := next(iter(saved.values())), dict):
            saved = dict(inner)
    optimizer = next((saved.pop(name) for name in OPTIMIZER if name in saved), None)
    model = next((saved[name] for name in MODEL if isinstance(saved.get(name), dict)), saved)
    # Lightning has a list of them.
    optimizer = next(iter(optimizer), None) if isinstance(optimizer, list) else optimizer
    for name, value in {**model, "optimizer": optimizer}.items():
        is_extra = str(name).endswith("_extra_state")
        kinds = (dict, type(None)) if name == "optimizer" else object if is_extra else Tensor
        if not isinstance(name, str) or not isinstance(value, kinds):
            found = f"{shown(name)}, of type {type(value).__name__}"
            raise _wrong("hold state_dicts, a model's alone or as 'model'", found, "save these")
    return model, optimizer


@_reading()
def fitting_weights(state: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """The state of a model as it takes it: without wrappers' prefixes, with all tied weights."""
    state, own = dict(state), model.state_dict()
    for prefix in ("module.", "_orig_mod."):
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    named = [*model.named_parameters(remove_duplicate=False)]
    kept = {id(p): state[name] for name, p in named if name in state}
    state = {name: kept[id(p)] for name, p in named if id(p) in kept} | state
    _check(own, state, "the weights of the model that Task.make_model makes")
    for name, p in named:
        if state[name] is not kept[id(p)] and not torch.equal(state[name], kept[id(p)]):
            raise _wrong("hold tied weights alike", f"others in {name!r}", "untie the model's")
    used = [n for n, p in named if p.requires_grad] + [n for n in own if n.endswith(RUNNING)]
    _check_values({name: state[name] for name in used}, own)
    return state


@_reading()
def fitting_optimizer(
    state: Any, model: nn.Module, optimizer: Optimizer, *, by_name: bool
) -> dict[str, Any]:
    """The state of an optimizer for this one, by parameters' names or by their numbers."""
    new = [dict(group) for group in optimizer.state_dict()["param_groups"]]
    groups, values = state["param_groups"], dict(state["state"])
    groups = [dict(groups[number]) for number in range(len(groups))]
    ids = [str(one) for group in groups for one in group["params"]]
    sizes, found = ([len(group["params"]) for group in x] for x in (new, groups))
    others = {*map(str, values)}.difference(ids)
    if sizes != found or others:
        what = f"{found}, and states of {len(others)} others"
        expected = f"hold the state of an optimizer with groups of {sizes} parameters"
        raise _wrong(expected, what, "make_optimizer as there, or a file of the weights alone")
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    # Saved by name, or by number in the order of that optimizer.
    places = order if {*ids} == {*order} else ids
    keys: list[Any] = order if by_name else [*range(len(order))]
    key_of = dict(zip(places, keys, strict=True))
    own, there = ([bool(group.get("maximize")) for group in x] for x in (new, groups))
    if own != there:
        raise _wrong(f"have maximize = {own}, as make_optimizer has", f"{there}", "set it there")
    _check_values({f"{n} of a group": x for g in groups for n, x in g.items() if n in new[0]}, {})
    for group, old in zip(new, groups, strict=True):
        kept = group.keys() & old.keys() - {"params", *TASKS_OWN}
        group.update({name: old[name] for name in kept})
        group["params"] = [keys[number] for number in group["params"]]
    states = {key_of[str(one)]: dict(own) for one, own in values.items()}
    return {"state": states, "param_groups": new}


@_reading()
def check_optimizer_state(state: Mapping[Any, Any], made: Mapping[Any, Any]) -> None:
    """Compares an optimizer's state, by names and shapes, with one that a step has made."""
    # An optimizer that makes none, such as plain SGD, has no use for any.
    both = (made or state) if state else ()
    own, found = (
        {f"{n} of {one}": x for one in both for n, x in s.get(one, {}).items()}
        for s in (made, state)
    )
    _check(own, found, "the state of the optimizer that Task.make_optimizer makes")
    _check_values({f"{n} of {one}": x for one, s in state.items() for n, x in s.items()}, own)


def _check_values(found: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Refuses numbers, in one's own types, that no training leaves: losses would be blamed."""
    for name, value in found.items():
        numbers = torch.as_tensor(value if isinstance(value, (Tensor, int, float)) else 0)
        numbers = numbers.to(getattr(own.get(name), "dtype", numbers.dtype))
        finite = bool(torch.isfinite(numbers).all())
        if not finite or (NEVER_NEGATIVE.match(name) and bool((numbers < 0).any())):
            what = f"{name!r}, {'negative' if finite else 'not finite'}"
            raise _wrong("hold finite numbers, no negative squares or counts", what, "an older one")


def _check(own: Mapping[str, Any], found: Mapping[str, Any], what: str) -> None:
    forms = [{name: _form(value) for name, value in one.items()} for one in (own, found)]
    wrong = [name for name in {**own, **found} if forms[0].get(name) != forms[1].get(name)]
    if wrong:
        here, there = (one.get(wrong[0], "missing") for one in forms)
        first = f"the first {shown(wrong[0])}: {there} in it, {here} here"
        differ = f"{len(wrong)} names or shapes that differ, {first}"
        raise _wrong(f"hold {what}", differ, "make it as in that training")


def _form(value: Any) -> str:
    """Shape of a tensor or a number, with its kind unless it is floating, or a whole number."""
    if not isinstance(value, Tensor):
        return "()" if isinstance(value, (int, float)) else type(value).__name__
    whole = value.ndim and not value.is_floating_point()
    kind = ", complex" if value.is_complex() else ", whole numbers" if whole else ""
    return f"{tuple(value.shape)}{kind}"
