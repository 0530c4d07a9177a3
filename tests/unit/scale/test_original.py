"""fairscale's own class beside ours and beside its reference, on every shape of model.

Runs where `pip install --no-deps fairscale` was done, or its source is on PYTHONPATH.
"""

import pytest
import torch

from tests.reference.layerwise import Original
from tests.unit.scale.cases import CASES, data_of, loss_of, model_of
from tests.unit.scale.training import unscaled_gradients

fairscale = pytest.importorskip("fairscale.optim.layerwise_gradient_scaler")
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

# What the boundaries can do and backward hooks on modules cannot.
RAISES = {"in place", "in place outside", "caller relies on it", "keywords, dictionary"}
RIGHT = {"sequential, identity at the end"}
# Leaves, where the case is a chain of them: the original cannot scale containers; or no patterns.
NAMES = {
    "sequential, identity at the end": {"a.lin": 4.0, "b.lin": 8.0, "c.lin": 2.0},
    "transformer": {"embed": 2.0, "encoder.layers.0": 8.0, "head": 4.0},
    "sequential": {"a.lin": 4.0, "b.lin": 8.0, "c.lin": 2.0},
}


def gradients(case, scales, make=None):
    """Unscaled gradients, of a class of fairscale's kind or ours."""
    model, loss = model_of(case), lambda model: loss_of(model, data_of(case))
    if make is None:
        unscaled_gradients(model, scales, loss)
    else:
        scaler = make(model, scales)
        scaler.scale()
        loss(model).backward()
        scaler.unscale()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


def deviation(found, plain):
    return ((found - plain).norm() / plain.norm()).item()


@pytest.mark.parametrize("case", CASES)
def test_the_original_is_right_on_sequential_models_alone(case):
    scales = NAMES.get(case, CASES[case][1])
    plain = gradients(case, {})
    assert deviation(gradients(case, scales), plain) < 1e-6
    if case in RAISES:
        with pytest.raises((RuntimeError, UserWarning), match=r"[hH]ook"):
            gradients(case, scales, fairscale.LayerwiseGradientScaler)
        return
    theirs = gradients(case, scales, fairscale.LayerwiseGradientScaler)
    # The reference divides where fairscale multiplies by reciprocals: with powers of two the same.
    assert torch.equal(theirs, gradients(case, scales, Original))
    wrong = deviation(theirs, plain)
    print(f"{case}: norm of the error {wrong:.3f}, of the gradient 1")
    assert (wrong < 1e-6) == (case in RIGHT)
