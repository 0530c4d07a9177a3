"""Triton's kernels on shards: by its interpreter, on two processes."""

import os

import pytest

from tests.distributed.device_steps import compare
from tests.distributed.ranks import on_ranks

LAUNCHES = {
    "lans": {"square_gradients": 1, "sum_kernel": 2, "move_moments": 1, "move_weights": 1},
    "lamb": {"square_gradients": 1, "sum_kernel": 2, "move_moments": 1, "move_weights": 1},
    # The one-element gain is worked on by itself.
    "scaled_adam": {"square_sums": 2, "sum_kernel": 4, "move_all": 2},
}


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_steps_are_those_of_the_formulas(tmp_path):
    pytest.importorskip("triton", "3.7", reason="triton 3.7 or newer is not installed")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("Triton compiles here, it does not interpret")
    for results in on_ranks(2, compare, tmp_path):
        for name, found in results.items():
            # Float32 sums in another order.
            assert found["difference"] < 1e-5
            assert found["launches"] == LAUNCHES[name]
            assert found["collectives"] == {"lans": 2, "lamb": 2, "scaled_adam": 1}[name]
            assert (found["moved"], found["skipped"]) == (False, 1)
