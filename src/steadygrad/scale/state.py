"""A scaler's state as plain numbers, and back."""

from collections.abc import Mapping
from typing import Any

import torch

from steadygrad._checks import InputError
from steadygrad.scale.options import check_scale
from steadygrad.scale.table import ScaleTable

__all__ = ["load_table", "read_state", "table_state"]

_COLUMNS = {"scale": "own", "growth_tracker": "tracker", "overflows": "overflows"}


def table_state(table: ScaleTable) -> dict[str, dict[str, float]]:
    """Each layer's scale, count of finite steps and count of overflows; waits for the device."""
    columns = {key: getattr(table, column).tolist() for key, column in _COLUMNS.items()}
    return {
        name: {key: values[i] for key, values in columns.items()}
        for i, name in enumerate(table.names)
    }


def read_state(table: ScaleTable, state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Loads a scaler's state into a table; None if it was one of ``torch.amp.GradScaler``.

    Raises:
        InputError: If it is neither, or of other layers; the table is as it was.
    """
    if "layers" in state:
        load_table(table, state["layers"])
        return state
    if "scale" not in state:
        raise InputError(
            f"Expected a scaler's state. Found the keys {sorted(state)}. Remedy: hand in what "
            "state_dict() returned while the scaler was enabled."
        )
    saved = table_state(table)
    own = {"scale": state["scale"], "growth_tracker": state.get("_growth_tracker", 0)}
    load_table(table, {**saved, "": {**saved[""], **own}})
    return None


@torch.no_grad()
def load_table(table: ScaleTable, saved: Mapping[str, Any]) -> None:
    """Puts :func:`table_state`'s numbers back, whatever the order of the layers.

    Raises:
        InputError: If they are of other layers, or no scales; the table is as it was.
    """
    known, found = set(table.names), set(saved)
    if known != found:
        missing, other = sorted(known - found), sorted(found - known)
        raise InputError(
            f"Expected a state of the layers that are scaled now. Found one without {missing} and "
            f"with {other}. Remedy: build the scaler with the same layer_scales."
        )
    for name in table.names:
        check_scale(f"state_dict['layers'][{name!r}]['scale']", saved[name]["scale"])
    for key, column in _COLUMNS.items():
        target = getattr(table, column)
        values = [saved[name][key] for name in table.names]
        target.copy_(torch.tensor(values, dtype=target.dtype))
    table.changed()
