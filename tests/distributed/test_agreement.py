"""Processes that share a parameter take and skip the same steps, whatever each of them finds."""

import pytest
import torch

from tests.distributed.agreement_steps import CASES, agreement
from tests.distributed.ranks import on_ranks

pytestmark = pytest.mark.distributed


# Four processes take three times as long as two.
@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def results(request, tmp_path_factory):
    world = request.param
    return on_ranks(world, agreement, tmp_path_factory.mktemp(f"agreement-{world}"))


@pytest.mark.parametrize("where", [0, 1], ids=["gradient", "scaler"])
def test_a_plain_gradient_that_is_not_finite_stops_all(results, where):
    for found in results:
        assert [found[key][where] for key in CASES] == [[False, 1.0]] * len(CASES)


def test_a_gradient_of_none_on_one_process_counts_as_zero(results):
    for found in results:
        assert all(found[key][2] for key in CASES)


def test_a_gradient_of_none_on_all_processes_is_none(results):
    """ScaledAdam's momentum goes on without a gradient, from zero here."""
    for found in results:
        assert all(found[key][3] for key in CASES)


def test_a_partial_gradient_of_none_on_one_process_counts_as_zero(results):
    """No process hangs, and copies stay alike; None on all processes is none."""
    for key in CASES:
        found = [own[f"partial {key}"] for own in results]
        assert found == [found[0]] * len(found)
        beside, whole, alone, whole_alone = (torch.tensor(weights) for weights in found[0])
        # Sums of small whole numbers are exact; norms over copies and a mean may not be.
        torch.testing.assert_close(beside, whole, rtol=1e-6, atol=0)
        torch.testing.assert_close(alone, whole_alone, rtol=1e-6, atol=0)


def test_batches_built_anew_on_one_process_repeat_no_collective(results):
    for found in results:
        for key in CASES:
            same, counts = found[key][4:]
            # The first sum over shards, the second of LANS and LAMB, and the partial gradients;
            # before the first step of all agreements on what is partial and what is spread alike.
            usual = 2 if key.startswith("scaled_adam") else 3
            assert counts == [usual + 2, usual, usual, usual] * 2
            assert same


def test_a_joint_norm_is_the_same_on_all_processes(results):
    """Beside a plain parameter that differs; else shards of one tensor took different steps."""
    for key in CASES:
        found = [own[f"clipping {key}"] for own in results]
        first, alone = found[0]
        assert [split for split, _ in found] == [first] * len(found)
        # The mean of the squares counts: float32 sums in another order, six steps of 0.1.
        assert first == pytest.approx(alone, rel=1e-5)


def test_experts_on_parts_of_a_mesh_are_not_mixed(results):
    """Each has norms of its own, and the step of a run without sharding."""
    for found in results:
        for key in CASES if len(results) == 4 else ():
            split, alone = found[f"experts {key}"]
            assert split[0] == pytest.approx(alone[0], rel=1e-5)
            assert split[1] == pytest.approx(alone[1], rel=1e-5)


def test_copies_stay_alike_beside_tensors_that_differ(results):
    """Joint norms and skipped steps reach the copies of a tensor, too."""
    for key in CASES if len(results) == 4 else ():
        found = [own[f"copies {key}"] for own in results]
        assert found == [found[0]] * 4
        assert [skipped for skipped, _ in found[0]] == [1.0] * 4
        assert all(weights[0] != 1.0 for _, weights in found[0])


def test_a_plain_parameter_on_one_process_alone(results):
    """No process hangs, and shards of one tensor take the same steps."""
    for key in CASES:
        found = [own[f"lopsided {key}"] for own in results]
        assert found == [found[0]] * len(found)
        frozen, *others = found[0]
        # ScaledAdam bounds and moves a frozen one only if it has a gradient: none has.
        assert frozen[0] == 1.0
        assert all(weight != 1.0 for weight, _ in others)


def test_reports_beside_a_frozen_group(results):
    for found in results:
        for key in CASES:
            split, alone = found[f"frozen {key}"]
            assert len(split) == len(alone) == 2
            # Only the frozen group's figures may be no numbers, as it has no gradients.
            assert _flat(split[0]) == pytest.approx(_flat(alone[0]), rel=1e-5, nan_ok=True)
            assert _flat(split[1]) == pytest.approx(_flat(alone[1]), rel=1e-5)
            assert any(abs(value) > 1 for value in _flat(split[1]).values())


def test_a_batch_more_on_one_process_changes_no_digit(results):
    """Norms are added up in the order of the parameters, whatever the batches are."""
    for key in CASES:
        found = [own[f"gaps {key}"] for own in results]
        assert found == [found[0]] * len(found)


def test_states_that_are_laid_out_otherwise(results):
    """They are laid out anew as they are loaded; those of another mesh are refused."""
    for found in results:
        for key in CASES:
            same, replicated, refused = found[f"layout {key}"]
            assert replicated == same
            assert "mesh" in refused


def test_squares_that_are_infinite_only_together_skip_the_step(results):
    for found in results:
        assert [found[f"together {key}"] for key in CASES] == [[[1.0], 1.0]] * len(CASES)


def _flat(report, at=""):
    """Numbers of a nested report by their place."""
    if isinstance(report, (int, float)):
        return {at: float(report)}
    if not isinstance(report, (dict, list)):
        return {}
    items = report.items() if isinstance(report, dict) else enumerate(report)
    return {k: v for name, value in items for k, v in _flat(value, f"{at}/{name}").items()}
