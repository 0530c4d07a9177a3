"""What each rank finds out about steps by Triton's interpreter; see test_device_steps.py."""

from collections import Counter

import torch
from torch.distributed.tensor.debug import CommDebugMode

from steadygrad import kernels
from steadygrad.kernels import device
from tests.distributed.optim_models import MAKERS, batch, difference, make, train, whole

STEPS = 7


def _launches(optimizer, step):
    """Kernels that a step starts, by name, and its collectives."""
    found, launch = Counter(), device.launch

    def counted(name, *given, **constants):
        found[name] += 1
        launch(name, *given, **constants)

    device.launch = counted
    try:
        with CommDebugMode() as collectives:
            step()
    finally:
        device.launch = launch
    return dict(found), collectives.get_total_counts()


def compare(rank, world):
    """Sharded steps by kernels against whole ones by formulas: weights, launches, collectives."""
    results = {}
    for name, maker in MAKERS.items():
        kernels.DEVICES = {"cuda"}
        plain = make("none", gain_shape=(1,))
        reference = maker(plain.parameters())
        reference.param_groups[0]["foreach"] = True
        train(plain, reference, range(STEPS))
        kernels.DEVICES = {"cpu"}
        model = make("fsdp")
        optimizer = maker(model.parameters())
        optimizer.param_groups[0]["fused"] = True
        train(model, optimizer, range(STEPS - 1), "fsdp")
        optimizer.zero_grad()
        model(batch(STEPS - 1, "fsdp")).square().mean().backward()
        launches, collectives = _launches(optimizer, optimizer.step)
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
