"""icefall's ScaledAdam checkpoints, whose state lies in stacks on some parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad._checks import InputError
from steadygrad.optim.state import StateField, as_tensor, check_outline, damaged


def unstack(
    checkpoint: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    fields: Mapping[str, StateField],
) -> list[dict[str, Any]]:
    """Gives every parameter its part of the stacks.

    icefall stacks parameters of one type and shape and keeps their state at the first of them; a
    group's clipping lies at the first parameter of the first stack. The groups are this
    optimizer's, with the same parameters in the same order; so are the states that are returned.
    """
    is_whole = isinstance(checkpoint, Mapping) and "optimizer" in checkpoint
    wanted = "checkpoint['optimizer']" if is_whole else "the optimizer's state_dict()"
    check_outline(checkpoint, f"hand in {wanted}")
    saved = checkpoint["param_groups"]
    sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != own:
        raise InputError(
            f"Expected groups of {own} parameters. Found {sizes} in the checkpoint. Remedy: build "
            "the optimizer from the parameters that icefall's was built from, in the same order."
        )
    found = []
    for old, new in zip(saved, groups, strict=True):
        found += _unstack_group(checkpoint["state"], old["params"], new, fields)
    return found


def _unstack_group(
    state: Mapping[int, Mapping[str, Any]],
    indices: Sequence[int],
    group: Mapping[str, Any],
    fields: Mapping[str, StateField],
) -> list[dict[str, Any]]:
    stacks: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for place, p in enumerate(group["params"]):
        stacks[str(p.dtype), p.shape].append(place)
    found: list[dict[str, Any]] = [{} for _ in group["params"]]
    shared: dict[str, Any] = {}
    for members in stacks.values():
        first, stack = indices[members[0]], state.get(indices[members[0]], {})
        shape = (len(members), *group["params"][members[0]].shape)
        if (delta := getattr(stack.get("delta"), "shape", None)) != shape:
            raise InputError(
                f"Expected a `delta` of shape {shape} at parameter {first} of the checkpoint. "
                f"Found {delta and tuple(delta)}. Remedy: a checkpoint of icefall's ScaledAdam for "
                "this very model, with its parameters in the order that the optimizer got them in."
            )
        for name in set(stack) & set(fields):
            p, field = group["params"][members[0]], fields[name]
            value = as_tensor(name, stack[name], p)
            if field.shared:
                shared[name] = value
                continue
            axis = 1 if field.length else 0
            if name != "step" and value.shape[axis : axis + 1] != shape[:1]:
                raise damaged(name, f"of {len(members)} parameters", tuple(value.shape))
            for row, place in enumerate(members):
                if name == "step":
                    found[place][name] = value
                elif field.elementwise:
                    found[place][name] = value[row]
                else:
                    part = value[:, row].reshape(-1) if field.length else value[row].squeeze()
                    found[place][name] = part
    return [{**one, **shared} for one in found]
