"""How far apart two computations of the same may be: in roundings, of each tensor's own scale.

Processors differ in how many numbers they add up side by side, so in the order of every sum, and
its rounding is a fraction of the terms, not of what they leave. The inner products of
`tests.contracts.problems` have 32 terms whose sizes add up to 7, and one of them comes to 0.007:
there a single rounding of a term is 3e-5 of the sum. An element's own size is therefore no
measure, nor is a fixed number; the largest element of its tensor is.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

__all__ = ["ROUNDINGS", "assert_alike", "assert_close"]

# Of 3000 random orders of each of those inner products, added up in 1 to 32 lanes, the two that are
# farthest apart are so by 9 roundings of the tensor's largest element.
ROUNDINGS = 32


def assert_alike(
    found: Iterable[tuple[str, Tensor]],
    expected: Iterable[tuple[str, Tensor]],
    *,
    within: torch.dtype | None = None,
    roundings: int = ROUNDINGS,
) -> None:
    """Two lists of named tensors are equal but for roundings; whole numbers to the bit.

    Tensors of one name and type have one scale: of a tensor of one element, that too may be what
    others left.

    Args:
        found: Names and tensors.
        expected: The same, in the same order.
        within: The type they were computed in; None: their own, float32 at least.
        roundings: How many of that type, of the largest element each. A 16-bit number may besides
            be the neighbour of the other.
    """
    pairs = [(n, a, b) for (n, a), (_, b) in zip(list(found), list(expected), strict=True)]
    scales: dict[tuple[str, torch.dtype], float] = defaultdict(float)
    for name, _, b in pairs:
        if b.numel() and b.is_floating_point():
            largest = b.detach().abs().nan_to_num(0.0, 0.0, 0.0).max().item()
            scales[name, b.dtype] = max(scales[name, b.dtype], largest)
    for name, a, b in pairs:
        if not b.is_floating_point():  # codes
            assert torch.equal(a, b), name
            continue
        computed = within or torch.promote_types(b.dtype, torch.float32)
        own, eps = torch.finfo(b.dtype).eps, torch.finfo(computed).eps
        torch.testing.assert_close(
            a.detach(),
            b.detach(),
            rtol=own if own > eps else 0.0,
            atol=roundings * eps * scales[name, b.dtype],
            msg=lambda text, name=name: f"{name}: {text}",
        )


def assert_close(found: Any, known: Any, place: str = "", **close: float) -> None:
    """Two nests are equal, but for floats, which ``pytest.approx`` compares."""
    if isinstance(known, (Mapping, list, tuple)):
        pairs = [dict(x if isinstance(x, Mapping) else enumerate(x)) for x in (found, known)]
        assert {*pairs[0]} == {*pairs[1]}, place
        for name, value in pairs[1].items():
            assert_close(pairs[0][name], value, f"{place}/{name}", **close)
    elif isinstance(known, float):
        assert found == pytest.approx(known, nan_ok=True, **close), place
    else:
        assert found == known, place
