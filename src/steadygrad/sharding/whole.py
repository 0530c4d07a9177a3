"""Sharding of a model for a study, and whole states of sharded models and optimizers."""

import copy
from collections.abc import Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer

__all__ = ["load_model_state", "load_optimizer_state", "shard_model", "whole_states"]


def shard_model(model: nn.Module) -> None:
    """Shards a model over all processes by FSDP2, in place."""
    from torch.distributed.fsdp import fully_shard

    # Each block by itself, so that only one is gathered at a time.
    for block in _blocks(model):
        if any(True for _ in block.parameters()):
            fully_shard(block)
    fully_shard(model)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Children of a model; of a container without a forward pass, its own children."""
    for child in model.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _blocks(child)
        else:
            yield child


def whole_states(model: nn.Module, optimizer: Optimizer) -> tuple[dict[str, Any], dict[str, Any]]:
    """State dicts of a sharded model and its optimizer with whole tensors, on every rank."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    found: tuple[dict[str, Any], dict[str, Any]] = get_state_dict(
        model, optimizer, options=StateDictOptions(full_state_dict=True)
    )
    return found


def load_model_state(model: nn.Module, state: dict[str, Any]) -> None:
    """Loads a state dict with whole tensors into a sharded model; the state is not changed."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    whole = StateDictOptions(full_state_dict=True)
    set_model_state_dict(model, copy.deepcopy(state), options=whole)


def load_optimizer_state(model: nn.Module, optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads a state dict with whole tensors into a sharded model's optimizer."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict

    whole = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, copy.deepcopy(state), options=whole)
