"""A task's own functions: what they raise, in one line, and checks of what they return."""

import math
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadygrad._checks import InputError

# Differences of losses, over their mean, that are rounding, with products in TF32 too.
ALIKE = 2.0**-8
# CUDA's and MPS's allocators, the CPU's (Windows, Linux), cuBLAS and cuSOLVER.
PHRASES = ("out of memory", "not enough memory", "can't allocate memory", "status_alloc_failed")


class TaskError(InputError):
    """A task's own code raised, or returned a value that cannot be used.

    What it raised is the ``__cause__``, with its traceback.
    """


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Turns whatever a piece of the user's code raises, but Ctrl-C, into one readable line."""
    try:
        yield
    # GeneratorExit closes a generator around this block.
    except (InputError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise TaskError(
            f"{what} should run without an error. Found {reason(error)}. "
            "Remedy: --debug shows the traceback."
        ) from error


def reason(error: BaseException) -> str:
    """The kind of an error and the first line of its message, if it has one."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}".rstrip(": ")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error, or one that it was raised from, says that memory ran out."""
    text, cause = str(error).lower(), error.__cause__
    if isinstance(error, RuntimeError) and any(phrase in text for phrase in PHRASES):
        return True
    own = isinstance(error, (torch.OutOfMemoryError, MemoryError))
    return own or (cause is not None and is_out_of_memory(cause))


def check_losses(losses: Any, batch_size: int, *, finite: bool = True) -> Tensor:
    """Returns ``losses`` when they are one for each of ``batch_size`` samples, and no mean.

    While gradients are recorded, they have to depend on the parameters. Reading whether they are
    ``finite`` waits for the device.
    """
    if not isinstance(losses, Tensor) or not losses.is_floating_point():
        found = str(losses.dtype) if isinstance(losses, Tensor) else type(losses).__name__
        remedy = "return the tensor of losses itself; of a Hugging Face model, Task.from_hf"
    # A mean may have been expanded.
    elif (losses.numel() == 1 or not any(losses.stride())) and (batch_size, losses.ndim) != (1, 1):
        found = f"shape {tuple(losses.shape)}: a loss that is already a mean"
        remedy = "reduction='none'; in place of a Hugging Face model's own loss, Task.from_hf"
    elif losses.shape != (batch_size,):
        found = f"shape {tuple(losses.shape)}"
        remedy = "average over every dimension but the first"
    elif torch.is_grad_enabled() and not losses.requires_grad:
        found = "losses without a gradient"
        remedy = (
            "no .detach(), .item() or torch.no_grad() between the model and its loss, nor "
            "requires_grad=False on all parameters"
        )
    elif finite and (bad := int((~torch.isfinite(losses.detach())).sum())):
        found = f"{bad} that are NaN or infinite"
        remedy = "a lower learning rate, or look for NaN in the data"
    else:
        return losses
    raise InputError(
        f"Task.per_sample_loss should return one finite floating-point loss for each of "
        f"{batch_size} samples, with shape ({batch_size},). Found {found}. Remedy: {remedy}."
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode, and each of its modules back into its own afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def losses_depend_on_company(
    losses: Callable[[Tensor, int], tuple[Tensor, Any]],
    model: nn.Module,
    count: int,
    total: int,
    eps: float,
) -> bool:
    """Whether the loss of a sample depends on the others of its batch, by more than rounding.

    The first half of a batch is compared with itself in other company and alone, in evaluation
    mode but for modules with buffers, as statistics are. Losses that differ without a reason, or
    for other random numbers in a batch of another shape, tell nothing.

    ``losses`` is ``(sample numbers, seed) -> losses, batch's shapes``, numbers and losses with
    shape ``(n,)``; the batch has ``count`` of ``total`` samples, and ``eps`` is the rounding of
    the losses' type.
    """
    half, near = torch.arange(count // 2), torch.arange(count)
    far = torch.cat([half, torch.arange(total - count + len(half), total)])

    def differ(one: Tensor, other: Tensor, part: float = ALIKE) -> bool:
        one, other = (x[: len(half)].cpu().double() for x in (one, other))
        size = float(one.nan_to_num(0, 0, 0).abs().mean())
        return not torch.allclose(one, other, rtol=0, atol=part * size, equal_nan=True)

    statistics = [module for module in model.modules() if module.training and module._buffers]
    # Half of a batch may be none, or too small for its statistics.
    with torch.no_grad(), evaluating(model), suppress(InputError):
        for module in statistics:
            module.training = True
        (first, shapes), (other, others), (again, _) = (losses(x, 0) for x in (near, far, near))
        random = differ(first, losses(near, 1)[0])
        if differ(first, again) or (random and shapes != others):
            return False
        if differ(first, other) or random:
            return differ(first, other)
        # Other shapes are rounded otherwise.
        return differ(first, losses(half, 0)[0], max(ALIKE, eps**0.5))
    return False


def check_model(model: Any, *, scaled: bool = False) -> nn.Module:
    """Returns a model when it is a module with values, real where gradients are ``scaled``."""
    if not isinstance(model, nn.Module) or any(map(is_lazy, model.parameters())):
        found = "lazy parameters in it" if isinstance(model, nn.Module) else type(model).__name__
        raise TaskError(
            f"Task.make_model should return a torch.nn.Module with values. Found {found}. Remedy: "
            "end the function with `return model`, after one batch through it if it is lazy."
        )
    for name, weight in model.named_parameters() if scaled else ():
        if weight.is_complex() and weight.requires_grad:
            raise TaskError(
                "Task.make_model should have real weights in float16: torch scales no complex "
                f"gradients. Found {name!r} of {weight.dtype}. Remedy: torch.view_as_complex of "
                "weights with a last dimension of two, or (not in inspect) another --dtype."
            )
    return model


def fingerprints(model: nn.Module) -> dict[str, int]:
    """Checksums of this process's parts of a model's state, by name, where they are plain."""
    # Not above: it loads torch.distributed, and modules that a file beside a task may replace.
    from steadygrad.shards import local

    state = {name: local(x) for name, x in model.state_dict().items() if isinstance(x, Tensor)}
    return {
        name: zlib.crc32(part.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        for name, part in state.items()
        if type(part) is Tensor and part.layout is torch.strided and part.numel()
    }


def check_model_maker(
    make: Callable[[], nn.Module], before: dict[str, int], after: dict[str, int]
) -> None:
    """Checks that ``make`` makes models anew, by fingerprints of one around a training step."""
    first = fingerprints(make())
    for name in [n for n, value in first.items() if value == after.get(n) != before.get(n)][:1]:
        raise InputError(
            f"Task.make_model should make a new model at each call. Found {name!r} of the last "
            "one in it, as training leaves it. Remedy: make the model, or a copy.deepcopy of one, "
            "inside the function; of a part that is shared, requires_grad_(False)."
        )


def optimizer_of(make: Callable[[float], Any], lr: float, what: str) -> Optimizer:
    """Makes an optimizer by a function of a learning rate, which ``what`` names."""
    with guarded(what):
        optimizer = make(lr)
    if not isinstance(optimizer, Optimizer):
        raise TaskError(
            f"{what} should return a torch.optim.Optimizer. Found {type(optimizer).__name__}. "
            "Remedy: end the function with `return optimizer`."
        )
    return optimizer


def check_optimizer_maker(
    make: Callable[[float], Any], model: nn.Module, lr: float, what: str, *, varied: bool = False
) -> Optimizer:
    """Makes an optimizer, and a second one to see whether it is new and has the learning rate.

    Some groups may multiply the rate or leave it aside. Where other rates and other optimizers of
    this model follow (``varied``), none may have ``lr`` as a rate of its own, or freeze parameters.
    """
    kept = []

    def traits() -> list[Any]:
        objects = [*model.modules(), *model.parameters()]
        kept.append(objects)  # one that is freed may give its identity to another
        marks = [(p.requires_grad, *(p._backward_hooks or ())) for p in model.parameters()]
        return [fingerprints(model), [*map(id, objects)], marks if varied else []]

    before = traits()
    first = optimizer_of(make, lr, what)
    after = traits()
    other = optimizer_of(make, 2 * lr, what)
    with guarded(f"Reading the learning rates of {what}"):
        rates, doubled = ([float(g["lr"]) for g in x.param_groups] for x in (first, other))
    asked = not varied and any(math.isclose(rate, lr, rel_tol=1e-6) for rate in rates)
    # What is trained next, and states that are loaded, would not be of this model.
    if after != before:
        found = "parameters with other values, exchanged, frozen or with other hooks"
        remedy = "make the model like that in Task.make_model"
    elif first is other or first.state is other.state:
        found, remedy = "the one that was returned before", "make it inside the function"
    elif rates == doubled and not asked:
        shown = ", ".join(f"{rate:g}" for rate in rates)
        found, remedy = f"{shown} for {lr:g} and for {2 * lr:g}", "pass lr on to it"
    else:
        return first
    raise TaskError(
        f"{what} should make a new optimizer at each call, at the learning rate that it is handed, "
        f"and leave the model as it is. Found {found}. Remedy: {remedy}."
    )


def check_gradients(optimizer: Optimizer, model: nn.Module, what: str) -> None:
    """Checks, after a backward pass, that an optimizer trains parameters of the model alone."""
    params = (p for group in optimizer.param_groups for p in group["params"])
    trained = {id(p) for p in params if p.grad is not None}
    others = len(trained.difference(map(id, model.parameters())))
    if others or not trained:
        raise TaskError(
            f"{what} and Task.per_sample_loss should train the parameters of the model that they "
            f"are handed, and none beside. Found {f'{others} others' if others else 'no gradient'} "
            "in the optimizer. Remedy: use no other model, and no parameters outside of it."
        )
