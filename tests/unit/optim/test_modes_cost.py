"""Work of a step that must grow with the number of parameters, and no faster, or be done once."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from steadygrad.optim import LAMB, LANS, ScaledAdam


class Outputs(TorchDispatchMode):
    """Counts the tensors that all operations return."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        found = function(*args, **(kwargs or {}))
        self.count += len(found) if isinstance(found, (list, tuple)) else 1
        return found


def outputs_of_a_step(kind, parameters: int) -> int:
    params = [nn.Parameter(torch.ones(3)) for _ in range(parameters)]
    for p in params:
        p.grad = torch.ones(3)
    optimizer = kind(params, foreach=False)
    optimizer.step()  # the first one builds what later ones use
    with Outputs() as outputs:
        optimizer.step()
    return outputs.count


@pytest.mark.parametrize("kind", [LAMB, LANS, ScaledAdam])
def test_a_step_without_multi_tensor_calls_is_linear(kind):
    counts = [outputs_of_a_step(kind, parameters) for parameters in (20, 40, 80)]
    assert counts[2] - counts[1] == 2 * (counts[1] - counts[0])


@pytest.mark.parametrize("kind", [LAMB, LANS, ScaledAdam])
@pytest.mark.parametrize("named", [True, False])
def test_options_that_stay_the_same_are_checked_once(kind, named, monkeypatch):
    p = nn.Parameter(torch.ones(3))
    optimizer = kind([("weight", p)] if named else [p])
    p.grad = torch.ones(3)
    optimizer.step()
    checked = []
    monkeypatch.setattr(kind, "_check_group", lambda _self, group: checked.append(group["lr"]))
    for lr in (0.1, 0.2):
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
    assert checked == []
    optimizer.param_groups[0]["eps"] = 0.5
    optimizer.step()
    assert checked == [0.2]
