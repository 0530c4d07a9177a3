"""Parameters on two devices in one optimizer.

The second device is `meta`: nothing can be computed together with its tensors, as with those of
another device, and what is copied from it to the host counts as ones.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.contracts.problems import assert_same, parameters, run
from tests.contracts.table import OPTIMIZERS
from tests.covering import covering

# A global norm over both devices would be made up.
APART = {name: entry for name, entry in OPTIMIZERS.items() if "max_grad_norm" not in entry.options}
every_optimizer = pytest.mark.parametrize("entry", APART.values(), ids=APART)


class Host(TorchDispatchMode):
    """Copies of meta tensors to the host are ones: what is finite and taken there."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy" and args[0].is_meta:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cpu":
                self.copies += 1
                return torch.ones(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        return func(*args, **kwargs)


def on_meta():
    return [torch.empty_like(p, device="meta").requires_grad_() for p in parameters()]


# Nor is there a group's norm over both.
CASES = {
    f"{name}-{'one group' if together else 'a group each'}": (entry, together)
    for name, entry in APART.items()
    for together in (True, False)
    if not (together and entry.joint)
}


@pytest.mark.few(7)
@covering(case=CASES, first=["meta", "cpu"], mode=[{}, {"foreach": True}, {"foreach": False}])
@pytest.mark.usefixtures("same_bits_at_all_places")
def test_each_goes_as_it_would_alone(case, first, mode):
    entry, together = case
    far, here, alone = on_meta(), parameters(), parameters()
    parts = [far, here] if first == "meta" else [here, far]
    given = [*parts[0], *parts[1]] if together else [{"params": part} for part in parts]
    optimizer, other = entry(given, **mode), entry(alone, **mode)
    optimizer.warn_after_skips = None
    with Host() as host:
        # One step past the first thresholds of clipping, and past the first sizes.
        for step in range(6):
            for p in far:
                p.grad = torch.empty_like(p)
            run(optimizer, here, [step])
    run(other, alone, range(6))
    assert host.copies > 0
    # Not the count of skipped steps: "not taken" is a one too.
    assert_same(snapshot_of(optimizer, here), snapshot_of(other, alone))
    assert all(t.is_meta for p in far for t in optimizer.state[p].values())


@every_optimizer
def test_numbers_come_back_from_the_host(entry):
    """Where torch's ZeroRedundancyOptimizer puts those that it loads."""
    far = on_meta()
    optimizer = entry(far)
    for p in far:
        state = optimizer.state[p]
        counts = {name: torch.ones(()) for name, value in state.items() if not value.ndim}
        optimizer.state[p] = {**state, **counts}
        p.grad = torch.empty_like(p)
    optimizer.step()
    assert all(t.is_meta for p in far for t in optimizer.state[p].values())


@every_optimizer
@pytest.mark.parametrize("mode", [{}, {"foreach": True}], ids=str)
def test_a_bad_gradient_on_the_host_stops_it_there(entry, mode):
    far, here = on_meta(), parameters()
    optimizer = entry([{"params": far}, {"params": here}], **mode)
    optimizer.warn_after_skips = None
    for p in far:
        p.grad = torch.empty_like(p)

    class Bad(Host):
        """The decision of both devices, which lies on the other, is no."""

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found = super().__torch_dispatch__(func, types, args, kwargs)
            name = func.overloadpacket.__name__
            decided = name == "_to_copy" and args[0].is_meta and args[0].dtype is torch.bool
            return torch.zeros_like(found) if decided and not found.is_meta else found

    with Host():
        run(optimizer, here, range(2), none=False)
    before = snapshot_of(optimizer, here)
    with Bad():
        run(optimizer, here, [2], none=False)
    assert_same(before, snapshot_of(optimizer, here))


def snapshot_of(optimizer, params):
    states = [t.clone() for p in params for n, t in optimizer.state[p].items() if n != "skipped"]
    return [p.detach().clone() for p in params] + states
