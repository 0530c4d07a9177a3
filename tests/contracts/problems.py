"""Parameters and gradients that the contracts are tried on."""

import io
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steadygrad.optim import codes
from tests.rounding import ROUNDINGS, assert_alike

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
NARROW = DTYPES[2:]
every_type = pytest.mark.parametrize("dtype", DTYPES, ids=str)
SHAPES = [(8, 4), (4,), (), (1,), (3, 2, 2), (0, 3), (8, 4)]


@contextmanager
def small_codes() -> Iterator[None]:
    """Small matrices have moments in eight bits too, where an optimizer is asked for them.

    Vectors and numbers have rows of one element, and never have them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codes, "LEAST", 1)
        patch.setattr(codes, "SHORTEST", 2)
        yield


@pytest.fixture(autouse=True)
def small_parameters_are_coded() -> Iterator[None]:
    """For the tests of the file or folder that imports this."""
    with small_codes():
        yield


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads of torch's."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def parameters(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """The same values for every call: matrices, a scalar, one element, none."""
    draw = torch.Generator().manual_seed(0)
    drawn = (torch.randn(shape, generator=draw) * 0.3 + 0.1 for shape in SHAPES)
    return [value.to(dtype).requires_grad_() for value in drawn]


def give_gradients(params: Iterable[Tensor], step: int, none: bool = True) -> None:
    """Gradients of a step; one parameter has none now and then."""
    draw = torch.Generator().manual_seed(100 + step)
    for place, p in enumerate(params):
        gradient = torch.randn(p.shape, generator=draw).to(p.device, p.dtype)
        p.grad = None if none and place == 1 and step % 4 == 2 else gradient


def run(
    optimizer: Optimizer, params: list[Tensor], steps: Iterable[int], none: bool = True
) -> None:
    for step in steps:
        give_gradients(params, step, none)
        optimizer.step()


def clones(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone().requires_grad_() for p in params]


def tensors_of(optimizer: Optimizer) -> list[tuple[str, Tensor]]:
    """Every state tensor but the count of skipped steps."""
    states = [optimizer.state[p] for g in optimizer.param_groups for p in g["params"]]
    return [(name, t) for state in states for name, t in state.items() if name != "skipped"]


def snapshot(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
    own = [p.detach().clone() for p in params]
    return own + [t.clone() for _, t in tensors_of(optimizer)]


def reloaded(state: Any) -> Any:
    """Saved to a file and loaded."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def assert_same(first: Iterable[Tensor], second: Iterable[Tensor]) -> None:
    """Equal to the bit, types included."""
    for a, b in zip(list(first), list(second), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


def hooks_of(module: nn.Module) -> int:
    """Number of hooks on its weights, and on it and the modules within."""
    weights = sum(len(p._backward_hooks or ()) for p in module.parameters())
    return weights + sum(len(m._forward_hooks | m._forward_pre_hooks) for m in module.modules())


def assert_rounded_alike(ours: Optimizer, theirs: Optimizer, *, roundings: int = ROUNDINGS) -> None:
    """Weights and states of two optimizers are equal but for the rounding of the states' types."""
    both = [_by_type(optimizer) for optimizer in (ours, theirs)]
    for dtype, found in both[0].items():
        # Where float64 is not rounded in between, the compiler takes b v + (1 - b) g^2 for
        # g^2 + b (v - g^2), whose roundings are 1 / (1 - b) times larger: a thousand.
        count = 1024 if dtype is torch.float64 else roundings
        assert_alike(found, both[1][dtype], within=dtype, roundings=count)


def _by_type(optimizer: Optimizer) -> dict[torch.dtype, list[tuple[str, Tensor]]]:
    """Names and tensors by the type that they were computed in."""
    found: dict[torch.dtype, list[tuple[str, Tensor]]] = {torch.float64: [], torch.float32: []}
    for p in (p for group in optimizer.param_groups for p in group["params"]):
        state = {name: t for name, t in optimizer.state[p].items() if name != "skipped"}
        exact = state["exp_avg_sq"].dtype if "exp_avg_sq" in state else torch.float32
        exact = torch.float32 if exact is torch.uint8 else exact
        for name, t in (state | {"weight": p}).items():
            # Norms are kept in float32 for every type, and the threshold is taken from them.
            found[torch.float32 if name.startswith("model_norm") else exact].append((name, t))
    return found


class Watch(TorchDispatchMode):
    """Notes the operations, the types that they return, and those that make the host wait."""

    WAITS = ("_local_scalar_dense", "item", "nonzero", "is_nonzero", "equal", "masked_select")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.types: set[torch.dtype] = set()
        # Of operations that got a tensor of 2^31 elements or more.
        self.large: set[str] = set()

    @property
    def waits(self) -> list[str]:
        return [name for name in self.names if name in self.WAITS]

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        if any(t.numel() >= 2**31 for t in tensors_in((args, kwargs))):
            self.large.add(self.names[-1])
        result = func(*args, **(kwargs or {}))
        self.types |= {t.dtype for t in tensors_in(result)}
        return result


class PeakMemory(TorchDispatchMode):
    """Bytes of new storages that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for storage in map(Tensor.untyped_storage, tensors_in(result)):
            key, size = storage._cdata, storage.nbytes()
            if size and key not in given | self._seen:
                self._seen.add(key)
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._free, key, size)
        return result

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size


def tensors_in(nest: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(nest) if isinstance(leaf, Tensor)]
