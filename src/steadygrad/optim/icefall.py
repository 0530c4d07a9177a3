"""icefall's ScaledAdam checkpoints, whose state lies in stacks on some parameters."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from steadygrad.optim.state import StateField, as_tensor, check_outline, damaged


def unstack(
    checkpoint: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    fields: Mapping[str, StateField],
) -> list[dict[str, Any]]:
    """Each parameter's part of the stacks.

    icefall stacks parameters of one type and shape and keeps their state at the first of them; a
    group's clipping lies at the first parameter of the first stack. The groups are this
    optimizer's, with the same parameters in the same order; so are the states that are returned.
    """
    check_outline(checkpoint, "hand in the optimizer's state_dict(), checkpoint['optimizer']")
    saved = checkpoint["param_groups"]
    sizes, own = [len(g["params"]) for g in saved], [len(g["params"]) for g in groups]
    if sizes != own:
        raise damaged("param_groups", f"of {own} parameters", sizes)
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
    params, stacks = group["params"], defaultdict[Any, list[int]](list)
    for place, p in enumerate(params):
        stacks[p.dtype, p.shape].append(place)
    found, shared = [dict[str, Any]() for _ in params], dict[str, Any]()
    for members in stacks.values():
        first, like = indices[members[0]], params[members[0]]
        stack, shape = state.get(first, {}), (len(members), *like.shape)
        if (delta := getattr(stack.get("delta"), "shape", None)) != shape:
            raise damaged("delta", f"of shape {shape} at parameter {first}", delta and tuple(delta))
        for name in set(stack) & set(fields):
            field, value = fields[name], as_tensor(name, stack[name], like)
            axis = 1 if field.length else 0
            if field.shared:
                shared[name] = value
            elif name == "step":
                for place in members:
                    found[place][name] = value
            elif value.shape[axis : axis + 1] != shape[:1]:
                raise damaged(name, f"of {len(members)} parameters", tuple(value.shape))
            else:
                for place, part in zip(members, value.unbind(axis), strict=True):
                    small = part.flatten() if field.length else part.squeeze()
                    found[place][name] = part if field.elementwise else small
    return [{**one, **shared} for one in found]
