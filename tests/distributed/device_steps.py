"""Each rank's report on steps by Triton's interpreter; see test_device_steps.py."""

from collections import Counter

import torch
from torch.distributed.tensor.debug import CommDebugMode

from steadygrad import kernels
from tests.distributed.optim_models import MAKERS, batch, difference, make, train, whole

STEPS = 7


def _launches(step):
    """Kernels that a step starts, by name, and its collectives."""
    from steadygrad.kernels.triton import runtime

    found, start = Counter(), runtime._start

    def counted(kernel, *given, **named):
        found[named.get("body", kernel).fn.__name__] += 1
        start(kernel, *given, **named)

    runtime._start = counted
    try:
        with CommDebugMode() as collectives:
            step()
    finally:
        runtime._start = start
    return dict(found), collectives.get_total_counts()


def compare(rank, world):
    """Sharded steps by kernels against whole ones by formulas: weights, launches, collectives."""
    results = {}
    kernels.BACKENDS = {"cpu": "triton"}
    for name, maker in MAKERS.items():
        plain = make("none", gain_shape=(1,))
        reference = maker(plain.parameters())
        reference.param_groups[0]["foreach"] = True
        train(plain, reference, range(STEPS))
        model = make("fsdp")
        optimizer = maker(model.parameters())
        optimizer.param_groups[0]["fused"] = True
        train(model, optimizer, range(STEPS - 1), "fsdp")
        optimizer.zero_grad()
        model(batch(STEPS - 1, "fsdp")).square().mean().backward()
        launches, collectives = _launches(optimizer.step)
        results[name] = {
            "difference": difference(model, plain),
            "launches": launches,
            "collectives": collectives,
        }
        # One process sees what is not finite, and all leave the step out.
        first = next(model.parameters()).grad.to_local()
        first[:1].fill_(float("nan") if rank == 0 else 1.0)
        before = [whole(p).clone() for p in model.parameters()]
        optimizer.step()
        after = [whole(p) for p in model.parameters()]
        results[name]["moved"] = not all(map(torch.equal, before, after))
        results[name]["skipped"] = float(optimizer.skipped)
    return results
