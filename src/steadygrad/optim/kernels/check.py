"""Whether kernels step as multi-tensor calls do, tried on the device where they are to be taken."""

from itertools import product
from typing import Any

import torch
from torch import Tensor

from steadygrad.numerics import wide
from steadygrad.optim import codes
from steadygrad.optim.batch import Gradients, types_for_loops
from steadygrad.optim.kernels import runtime
from steadygrad.optim.passes import Types
from steadygrad.optim.state import StatefulOptimizer

# Whatever a user chose: a rate of zero, say, would hide what moves weights. Every gradient is
# clipped, as one at the threshold might be by one way only.
OPTIONS = {"lr": 0.05, "weight_decay": 0.1, "clip_value": 0.1, "size_update_period": 2}
OPTIONS |= {"clipping_scale": 0.5, "clipping_update_period": 2}
# Roundings that sums in two orders, and two roots, may be apart, of the largest such number: what
# cancels keeps those of its terms.
ROUNDINGS = 256


def difference(optimizer: StatefulOptimizer, types: Types, device: torch.device) -> str | None:
    """The first difference between tensors after some steps by both ways, or None.

    Codes must be equal: what goes into them is rounded to the last digit, and their sums of float64
    to float32. Other numbers may be some roundings apart.
    """
    with torch.inference_mode(False), torch.no_grad():
        found, expected = (_stepped(optimizer, types, device, fused) for fused in (True, False))
    # Numbers are no better than the narrowest that they are from, 16-bit weights aside.
    is_double, scales = types[1:3] == (torch.float64, torch.float64), dict[str, Tensor]()
    eps = torch.finfo(torch.float64 if is_double else torch.float32).eps
    for name, b in expected:
        top = b.abs().double().nan_to_num(0.0, 0.0, 0.0).max()
        scales[name] = torch.maximum(top, scales.get(name, top))
    for (name, a), (_, b) in zip(found, expected, strict=True):
        if (wrong := _differs(a, b, eps, scales[name])).any():
            i = int(wrong.flatten().int().argmax())
            return (
                f"`{name}` of shape {tuple(a.shape)} is {a.flatten()[i]:.9g} at {i} by kernels on "
                f"{device}, and {b.flatten()[i]:.9g} by multi-tensor calls"
            )
    return None


def _differs(found: Tensor, expected: Tensor, eps: float, scale: Tensor) -> Tensor:
    """Elements that are further apart than roundings of a scale explain."""
    wrong = found != expected
    if not found.is_floating_point():
        return wrong
    apart, own = (found.double() - expected.double()).abs(), torch.finfo(found.dtype).eps
    if found.element_size() > 2:
        return wrong & ~(apart <= ROUNDINGS * max(eps, own) * scale)
    # A number of 16 bits may be rounded to its neighbour where it was half way, which is rare.
    return wrong & ~((apart <= own * scale) & (wrong.sum() <= 2 + wrong.numel() // 64))


def _stepped(
    optimizer: StatefulOptimizer, types: Types, device: torch.device, fused: bool
) -> list[tuple[str, Tensor]]:
    """Names and copies of all tensors after some steps, by kernels or by multi-tensor calls.

    Their sizes are around the ends of blocks and of chunks, their rows of codes too. A step is left
    out for a NaN, and a gradient is None in the next.
    """
    (grad, weight, state, own, total), chunk, block = types, runtime.CHUNK, runtime.BLOCK
    is_coded, whole = state is torch.uint8, chunk // codes.BLOCK + 1
    sizes = 3, 1, block - 1, block, chunk, chunk + block + 1
    shapes: list[tuple[int, ...]] = [(size,) for size in sizes]
    if is_coded:
        shapes = [(codes.LEAST // 40 + 2, 40), (whole // 4 + 2, 1000), (whole, codes.BLOCK)]
    # Where any are codes sums are wider, also of small parameters, which stay numbers.
    state_dtype = "float32" if total is wide(weight) else "8bit"
    asked = {"master_weights": weight is not own, "state_dtype": state_dtype}
    known = {k: v for k, v in (OPTIONS | asked).items() if k in optimizer.defaults}
    params = [_numbers(shape, i).to(device, own) for i, shape in enumerate(shapes)]
    one: Any = object.__new__(type(optimizer))
    StatefulOptimizer.__init__(one, params, optimizer.defaults | known)
    for p, name in product(params, one._large):
        one.state[p][name] = one.state[p][name].to(state)

    def types_of(p: Tensor, g: Tensor | None, _: Any) -> Types | None:
        return types_for_loops(p, g, one.state[p], one._large, one._is_exact) if fused else None

    for step in range(1, 5):
        first = step * len(shapes)
        drawn = [_numbers(shape, first + i).to(device, grad) for i, shape in enumerate(shapes)]
        if step == 2:
            drawn[-1].view(-1)[-1] = torch.nan
        grads = [None if step == 3 and i == 0 else g for i, g in enumerate(drawn)]
        has_grad = [g is not None or one.none_is_zero for g in grads]
        received = Gradients(grads, has_grad, has_grad, torch.full((), 2.0, device=device))
        vars(one).update(_loop_types=types_of, _gradients=lambda _, r=received: r)
        one._step()
    states = [pair for p in params for pair in one.state[p].items()]
    return [(n, t.cpu()) for n, t in [*(("weight", p) for p in params), *states]]


def _numbers(shape: tuple[int, ...], place: int) -> Tensor:
    """Numbers between -0.5 and 0.5 that no generator is asked for."""
    count = torch.Size(shape).numel()
    drawn = torch.arange(count, dtype=torch.float64, device="cpu") * 0.6180339887498949
    return drawn.add_(0.37 * place).frac_().sub_(0.5).view(shape)
