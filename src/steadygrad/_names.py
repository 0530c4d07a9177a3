"""Names of modules and parameters as their author wrote them."""

from torch import nn

# What wrappers put into names: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """Removes the parts of a name that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def own_name(name: str, model: nn.Module) -> str:
    """Removes the names of wrappers of a whole model as well: DDP, torch.compile."""
    while isinstance(model, nn.parallel.DistributedDataParallel) or "_orig_mod" in model._modules:
        name, model = name.partition(".")[2], next(model.children())
    return plain_name(name)
