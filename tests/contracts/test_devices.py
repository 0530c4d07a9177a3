"""Parameters on two devices in one optimizer.

The second device is `meta`: nothing can be computed together with its tensors, as with those of
another device, and what is copied from it to the host counts as ones.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.optim import codes
from tests.contracts.problems import assert_same, parameters, run
from tests.contracts.table import OPTIMIZERS
from tests.covering import covering


class Host(TorchDispatchMode):
    """Copies of meta tensors to the host are ones: finite and taken, unless that device says no."""

    def __init__(self, is_bad=False):
        super().__init__()
        self.is_bad, self.copies = is_bad, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func.overloadpacket.__name__ == "_to_copy" and args[0].is_meta:
            device = kwargs.get("device")
            if device is not None and torch.device(device).type == "cpu":
                self.copies += 1
                is_no = self.is_bad and args[0].dtype is torch.bool
                return torch.full(
                    args[0].shape, not is_no, dtype=kwargs.get("dtype") or args[0].dtype
                )
        return func(*args, **kwargs)


# Neither a group's norm nor a global one is over both devices.
CASES = {
    f"{name}-{'one group' if together else 'a group each'}": (entry, together)
    for name, entry in OPTIMIZERS.items()
    for together in (True, False)
    if not ((together and entry.joint) or "max_grad_norm" in entry.options)
}


@pytest.mark.few(7)
@covering(case=CASES, first=["meta", "cpu"], mode=[{}, {"foreach": True}, {"foreach": False}])
def test_each_goes_as_it_would_alone(case, first, mode, monkeypatch):
    monkeypatch.setattr(codes, "PLACE", 0)  # the same random bits wherever a parameter lies
    entry, together = case
    far = [torch.empty_like(p, device="meta").requires_grad_() for p in parameters()]
    here, alone = parameters(), parameters()
    parts = [far, here] if first == "meta" else [here, far]
    given = [*parts[0], *parts[1]] if together else [{"params": part} for part in parts]
    optimizer, other = entry(given, **mode), entry(alone, **mode)
    optimizer.warn_after_skips = None
    with Host() as host:
        # One step past the first thresholds of clipping, and past the first sizes.
        for step in range(6):
            for p in far:
                p.grad = torch.empty_like(p)
                if step == 3:
                    # As torch's ZeroRedundancyOptimizer leaves numbers that it loads.
                    state = optimizer.state[p]
                    counts = {name: torch.ones(()) for name, t in state.items() if not t.ndim}
                    optimizer.state[p] = {**state, **counts}
            run(optimizer, here, [step])
    run(other, alone, range(6))
    assert host.copies > 0
    assert_same(snapshot_of(optimizer, here), snapshot_of(other, alone))
    assert all(t.is_meta for p in far for t in optimizer.state[p].values())
    before = snapshot_of(optimizer, here)
    with Host(is_bad=True):
        run(optimizer, here, [6], none=False)
    assert_same(before, snapshot_of(optimizer, here))


def snapshot_of(optimizer, params):
    """Not the count of skipped steps: "not taken" is a one too."""
    states = [t.clone() for p in params for n, t in optimizer.state[p].items() if n != "skipped"]
    return [p.detach().clone() for p in params] + states
