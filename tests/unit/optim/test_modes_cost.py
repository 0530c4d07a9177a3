"""Work of a step that must grow with the number of parameters, and no faster."""

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
