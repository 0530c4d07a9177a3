"""Triton's interpreter with roundings to the nearest, as a device has them."""

from typing import Any

import numpy as np
import torch
import triton.language as tl


def converted(numbers: Any, given: Any, wanted: Any, mode: Any) -> Any:
    """Bits of numbers in another type: the interpreter's own does not round to the nearest."""
    kinds = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16}
    source = torch.from_numpy(np.ascontiguousarray(numbers))
    bits = {tl.float32: torch.int32, tl.bfloat16: torch.uint16}[wanted]
    return source.view(kinds[given]).to(kinds[wanted]).view(bits).numpy()
