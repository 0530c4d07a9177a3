r"""Adan on steadygrad's base for optimizers: sharded, resumable, with masters for 16-bit weights.

With :math:`g_0 = g_1`, and all three averages corrected for their bias as Adam's are,

.. math::
    m &\leftarrow \beta_1 m + (1 - \beta_1)\, g_t \qquad
    n \leftarrow \beta_2 n + (1 - \beta_2)\, (g_t - g_{t-1}) \\
    v &\leftarrow \beta_3 v + (1 - \beta_3)\, (g_t + \beta_2 (g_t - g_{t-1}))^2 \\
    x &\leftarrow \frac{1}{1 + \eta\lambda}
        \left( x - \eta\, \frac{m + \beta_2 n}{\sqrt{v} + \epsilon} \right)

The betas are one less those of the paper, as in the authors' program. The loop for CPUs is in
``adan_loops.py``. Run as a script, it is compared with a literal one.

References:
    | Adan: Adaptive Nesterov Momentum Algorithm for Faster Optimizing Deep Models
    | (Xie et al., 2022)
    | https://arxiv.org/abs/2208.06677
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from steadygrad._checks import check_number
from steadygrad.optim.base import ShardedOptimizer
from steadygrad.optim.batch import ParamBatch
from steadygrad.optim.buckets import Bucket
from steadygrad.optim.checks import check_switch, options_of
from steadygrad.optim.passes import Pass, clamp, decays_of, grad_sq_norms, move_by, where
from steadygrad.optim.state import ADAM_FIELDS, StateField

BETAS = (0.98, 0.92, 0.99)


class Options(NamedTuple):
    """Numbers of a group that the pass needs."""

    beta1: float
    beta2: float
    beta3: float
    eps: float


class Factors(NamedTuple):
    """Factors of the pass, each with shape ``(tensors)``.

    Attributes:
        taken: Whether the parameter takes the step.
        sign: -1 to maximise.
        follows: Whether there was a step, and so a gradient, before.
        along_m: Factor on the average of gradients.
        along_n: Factor on that of their differences.
        unbias3: Correction of the second moment.
        keep: Factor on the weight.
    """

    taken: Tensor
    sign: Tensor
    follows: Tensor
    along_m: Tensor
    along_n: Tensor
    unbias3: Tensor
    keep: Tensor


def factors(batch: ParamBatch, options: Options) -> Factors:
    """Works out the factors of a step that is already counted."""
    group, t = batch.group, clamp(batch.steps, 1, None)
    unbias1, unbias2, unbias3 = (1 / (1 - beta**t) for beta in options[:3])
    one = t / t
    rate = one * batch.number(group["lr"])
    decay = rate * group["weight_decay"]
    keep = 1 - decay if group["no_prox"] else 1 / (1 + decay)
    along = rate if group["no_prox"] else rate * keep
    return Factors(
        batch.taken,
        one * batch.sign,
        batch.taken & (t > 1),
        where(batch.taken, along * unbias1, 0.0),
        where(batch.taken, along * unbias2 * options.beta2, 0.0),
        unbias3,
        where(batch.taken, keep, 1.0),
    )


def _move(bucket: Bucket, by: Factors, options: Options) -> None:
    m, v, n, previous = bucket.moments
    taken, sign, follows, along_m, along_n, unbias3, keep = bucket.each(bucket.dtype, *by)
    decay1, decay2, decay3, forget = decays_of(bucket, (*options[:3], 0.0), taken)
    g = bucket.sanitized(taken, m.dtype).mul_(sign)
    change = (g - previous).mul_(follows)
    m.mul_(decay1).add_(g, alpha=1 - options.beta1)
    n.mul_(decay2).add_(change, alpha=1 - options.beta2)
    previous.mul_(forget).add_(g)
    g.add_(change, alpha=options.beta2)
    v.mul_(decay3).addcmul_(g, g, value=1 - options.beta3)
    del g, change  # Two temporaries at a time, no more.
    u = (m * along_m).addcmul_(n, along_n)
    u.div_((v * unbias3).sqrt_().add_(options.eps))
    bucket.keep_moments(by.taken)
    move_by(bucket, keep, u)


move = Pass(_move, loop="adan_loops:move_kernel")


class Adan(ShardedOptimizer):
    """Adaptive Nesterov momentum.

    One packed collective a step where parameters are sharded, none elsewhere. A step with a
    non-finite gradient, or one whose differences would have infinite squares, changes nothing and
    is counted in ``skipped``. A gradient of None leaves its parameter and state alone.

    Args:
        params: Parameters, named parameters, or groups of either.
        lr: A number or a tensor of one element.
        betas: Decays of the averages of gradients, of their differences, and of squares.
        eps: Added to the root of the second moment, positive.
        weight_decay: Decoupled, a fraction of the weight per unit of the learning rate.
        no_prox: Whether the decay is AdamW's, ``1 - lr * weight_decay`` before the step, in place
            of the paper's division after it.
        master_weights: Whether fp16 and bf16 parameters have float32 masters; None: yes.
        foreach: Whether to work on several parameters in a call; None: where nothing is fused.
        fused: Whether to fuse a step's passes, as in :class:`steadygrad.optim.LANS`.
        maximize: Whether to go up instead of down.
        capturable: Whether steps may be recorded in a CUDA graph, as in torch.

    Raises:
        InputError: If an option is out of range or a parameter is complex or sparse.
    """

    _betas = 3
    _passes = (grad_sq_norms, move)
    _fields: Mapping[str, StateField] = {
        **ADAM_FIELDS,
        "exp_avg_diff": StateField(elementwise=True),
        "previous_grad": StateField(elementwise=True),
    }

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        *,
        betas: tuple[float, float, float] = BETAS,
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        no_prox: bool = False,
        master_weights: bool | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        maximize: bool = False,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()))

    def _check_group(self, group: Mapping[str, Any]) -> None:
        super()._check_group(group)
        check_number("eps", group["eps"], low=0, low_open=True)
        check_number("weight_decay", group["weight_decay"], low=0)
        check_switch("no_prox", group["no_prox"], (True, False))

    def _update(self, batches: Sequence[ParamBatch]) -> Tensor:
        sums = [grad_sq_norms(batch) for batch in batches]
        _, ok, _ = self._first_sums(batches, sums, [_has_room] * len(batches))
        for batch in batches:
            batch.store("step", batch.columns["step"] + batch.taken)
            options = Options(*batch.group["betas"], batch.group["eps"])
            move(batch, factors(batch, options), options)
        return ok


def _has_room(sums: Any) -> Any:
    # What is squared is at most 1 + 2 times the largest gradient.
    return sums[0] * 9 < torch.inf


def literal(x: Tensor, gradients: Sequence[Tensor], lr: float, weight_decay: float) -> Tensor:
    """Adan as it is written down, on one tensor."""
    beta1, beta2, beta3 = BETAS
    m, n, v, before = 0.0 * x, 0.0 * x, 0.0 * x, gradients[0]
    for t, g in enumerate(gradients, 1):
        m = beta1 * m + (1 - beta1) * g
        n = beta2 * n + (1 - beta2) * (g - before)
        v = beta3 * v + (1 - beta3) * (g + beta2 * (g - before)) ** 2
        step = m / (1 - beta1**t) + beta2 * n / (1 - beta2**t)
        x = x - lr * step / ((v / (1 - beta3**t)).sqrt() + 1e-8)
        x, before = x / (1 + lr * weight_decay), g
    return x


def main() -> float:
    """Compares both on some gradients, trains a small model, and returns its last loss."""
    torch.manual_seed(0)
    start = torch.randn(64, 64, dtype=torch.float64)
    gradients = list(torch.randn(20, 64, 64, dtype=torch.float64))
    for mode in ({"foreach": True}, {}):
        weight = nn.Parameter(start.clone())
        optimizer = Adan([weight], lr=0.01, weight_decay=0.1, **mode)
        for gradient in gradients:
            weight.grad = gradient
            optimizer.step()
        difference = (weight - literal(start, gradients, 0.01, 0.1)).abs().max().item()
        assert difference < 1e-12, difference

    model, inputs = (
        nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)),
        torch.randn(256, 8),
    )
    targets = inputs.prod(dim=1, keepdim=True).sign()
    optimizer = Adan(model.parameters(), lr=0.01, weight_decay=0.02)
    for _ in range(200):
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"as the literal loop; loss after 200 steps of Adan: {loss.item():.3f}")
    return loss.item()


if __name__ == "__main__":
    main()
