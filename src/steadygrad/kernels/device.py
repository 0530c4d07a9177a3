"""Kernels for accelerators: which there are, and how they start. They need Triton.

They are compiled when a table is first made, by a run over tensors none of which takes part: so a
step never finds in its midst that something cannot be compiled, and CUDA graphs find all loaded.
"""

import importlib
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

from steadygrad.kernels.device_tables import DeviceTable

__all__ = ["BLOCK", "Types", "launch", "launch_chunks"]

# Elements that a program works on at a time.
BLOCK = 1024

_ROOMS = {
    "totals": "triton_parts",
    "square_sums": "triton_lans",
    "lans_directions": "triton_lans",
    "lans_apply": "triton_lans_apply",
    "scaled_adam_sums": "triton_scaled_adam",
    "scaled_adam_update": "triton_scaled_adam",
    "learn_each": "triton_sizes",
    "clip_and_learn": "triton_clipping",
}
# Types of gradients, weights, state, and of the parameters that weights are rounded to.
Types = tuple[torch.dtype, torch.dtype, torch.dtype, torch.dtype]
_NAMES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
}


@cache
def _kernel(name: str) -> Any:
    return getattr(importlib.import_module(f"steadygrad.kernels.{_ROOMS[name]}"), name)


@cache
def _type(dtype: torch.dtype) -> Any:
    return getattr(importlib.import_module("triton.language"), _NAMES[dtype])


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def launch(name: str, device: torch.device, programs: int, *given: Any, **constants: Any) -> None:
    """Starts a kernel.

    Args:
        name: Of the kernel.
        device: Where it runs.
        programs: How many there are of it.
        given: Tensors and numbers.
        constants: What it is compiled for.
    """
    with _on(device):
        _kernel(name)[(programs,)](*given, **constants)


def launch_chunks(
    name: str, table: DeviceTable, types: Sequence[Types], *, whole: bool, aligned: bool
) -> None:
    """Starts a kernel over all chunks of a table, once for each set of types.

    Args:
        name: Of the kernel.
        table: The tensors.
        types: The sets of types.
        whole: Whether sums of tensors are those of this table's chunks, as nothing is sharded.
        aligned: Whether all memory starts at a multiple of 16 bytes.
    """
    for (start, count), (grad, weight, state, param) in zip(table.ranges, types, strict=True):
        launch(
            name,
            table.device,
            count,
            *table.parts(),
            table.chunks,
            table.sums,
            table.totals,
            table.factors,
            table.flags,
            start,
            table.slots,
            table.tensors,
            grad=_type(grad),
            weight=_type(weight),
            state=_type(state),
            param=_type(param),
            whole=whole,
            block=BLOCK,
            aligned=aligned,
        )
