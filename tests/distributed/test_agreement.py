"""Processes that share a parameter take and skip the same steps, whatever each of them finds."""

import pytest

from tests.distributed.agreement_steps import MAKERS, MODES, agreement
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module", params=[2, 4])
def results(request, tmp_path_factory):
    world = request.param
    return on_ranks(world, agreement, tmp_path_factory.mktemp(f"agreement-{world}"))


def keys():
    return [f"{name} {mode}" for name in MAKERS for mode in MODES]


@pytest.mark.parametrize("where", [0, 1], ids=["gradient", "scaler"])
def test_a_plain_gradient_that_is_not_finite_stops_all(results, where):
    for found in results:
        assert {key: found[key][where] for key in keys()} == {key: [False, 1.0] for key in keys()}


def test_a_gradient_of_none_on_one_process_counts_as_zero(results):
    for found in results:
        assert {key: found[key][2] for key in keys()} == dict.fromkeys(keys(), True)


def test_a_gradient_of_none_on_all_processes_is_none(results):
    """ScaledAdam's momentum goes on without a gradient, from zero here."""
    for found in results:
        assert {key: found[key][3] for key in keys()} == dict.fromkeys(keys(), True)


def test_batches_built_anew_on_one_process_repeat_no_collective(results):
    for found in results:
        for key in keys():
            same, counts = found[key][4:]
            # The first sum over shards, the second of LANS and LAMB, and the partial gradients.
            assert counts == [2 if key.startswith("scaled_adam") else 3] * 8
            assert same
