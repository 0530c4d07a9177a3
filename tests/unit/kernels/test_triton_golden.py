"""Kernels for accelerators repeat the first steps of golden files: by Triton's interpreter.

All steps of all files would take ten minutes so; tests/gpu takes those of ScaledAdam on a device.
"""

import pytest

from steadygrad.optim import LANS, ScaledAdam
from tests.golden.trajectories import Trajectory

pytestmark = [
    pytest.mark.usefixtures("interpreter"),
    # numpy warns where the interpreter divides by zero or overflows; what comes of it is not used.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]


def test_a_golden_file_of_lans():
    golden = Trajectory.read("lans-fused-default")
    values, given = golden.parameters(), golden.config["kwargs"]
    optimizer = LANS(
        values.values(), lr=given["learning_rate"], weight_decay=given["wd"], fused=True
    )
    assert golden.follow(optimizer, values, range(8)) < 2e-6


@pytest.mark.parametrize(
    ("name", "tolerance"),
    [("scaled_adam-clipped-float64", 1e-12), ("scaled_adam_zipformer-clipped-float32", 2e-5)],
)
def test_golden_files_of_scaled_adam(name, tolerance):
    golden = Trajectory.read(name)
    values = golden.parameters()
    kwargs = {k: tuple(v) if k == "betas" else v for k, v in golden.config["kwargs"].items()}
    recipe = "zipformer" if "zipformer" in name else "stateless7"
    optimizer = ScaledAdam(values.values(), **kwargs, recipe=recipe, fused=True)
    assert golden.follow(optimizer, values, range(13)) < tolerance
