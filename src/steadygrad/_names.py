"""Names of modules and parameters as their author wrote them."""

__all__ = ["plain_name"]

# What wrappers put into names: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}


def plain_name(name: str) -> str:
    """Removes the parts of a name that wrappers added."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
