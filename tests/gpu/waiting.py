"""No wait for the device."""

import contextlib
import warnings
from collections.abc import Iterator

import torch


@contextlib.contextmanager
def no_waiting() -> Iterator[None]:
    """Lets what waits for the device fail, as far as torch notices."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
