"""Errors that say that a device or the machine has too little memory."""

import torch

__all__ = ["is_out_of_memory"]

# CUDA's and MPS's allocators, the CPU's (Windows, Linux), cuBLAS and cuSOLVER.
PHRASES = ("out of memory", "not enough memory", "can't allocate memory", "status_alloc_failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out.

    A smaller micro-batch may then succeed. ``TaskError`` counts by its cause.
    """
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in PHRASES):
        return True
    return error.__cause__ is not None and is_out_of_memory(error.__cause__)
