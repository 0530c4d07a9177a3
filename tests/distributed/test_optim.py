"""Sharded equals unsharded, in a fixed number of collectives, through every checkpoint."""

import pytest

from tests.distributed import optim_checkpoints, zero_steps
from tests.distributed.optim_models import CODED, LAYOUTS, MAKERS
from tests.distributed.optim_steps import everything
from tests.distributed.ranks import on_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

COLLECTIVES = {"lans": 2, "lamb": 2, "scaled_adam": 1}
COLLECTIVES |= {f"{name}-8bit": count for name, count in COLLECTIVES.items()}
# Over how many processes each goes: replicas are not asked.
GROUP = {(2, "fsdp"): 2, (2, "tp"): 2, (4, "fsdp"): 4, (4, "hsdp"): 2, (4, "2d"): 4}
# First on what is partial, where copies are, then on what is spread alike: axis by axis of a mesh.
AGREEMENTS = {
    (2, "fsdp"): [2],
    (2, "tp"): [2, 2],
    (4, "fsdp"): [4],
    (4, "hsdp"): [2, 2, 2, 2],
    (4, "2d"): [2, 2, 2, 2, 2],
}
SHARED = {"lans": 1, "lamb": 1, "scaled_adam": 5}  # tensors that all parameters of a group share
SHARED |= {f"{name}-8bit": count for name, count in SHARED.items()}
FORMS = ("nested", "flat")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def four(tmp_path_factory, folder):
    return on_ranks(4, everything, tmp_path_factory.mktemp("four"), str(folder))


@pytest.fixture(scope="module")
def two(tmp_path_factory, folder, four):
    return on_ranks(2, everything, tmp_path_factory.mktemp("two"), str(folder))


@pytest.fixture(params=[4, 2])
def results(request, four, two):
    return request.param, {4: four, 2: two}[request.param]


def runs(world):
    return [f"{name} {layout}" for name in MAKERS for layout in LAYOUTS[world]]


def comparable(world):
    """Runs whose parameters have codes if the unsharded ones do: theirs must not be cut."""
    cut = [f"{name} {layout}" for name in CODED for layout in ("tp", "2d")]
    return [key for key in runs(world) if key not in cut]


def test_parameters_equal_the_unsharded_run(results):
    world, ranks = results
    for found in ranks:
        # Clipping is part of it: gradients were above the threshold at least once.
        assert found["trajectories"]["scaled_adam clipped"] > 0
        differences = {key: found["trajectories"][key] for key in comparable(world)}
        # float32 sums over shards in another order, 20 steps of 1e-2.
        assert {k: v for k, v in differences.items() if not v < 1e-6} == {}


def test_diagnostics_are_those_of_the_unsharded_run(results):
    world, ranks = results
    for found in ranks:
        reports = found["trajectories"]["reports"]
        assert list(reports) == runs(world)
        for count, unlike in (reports[key] for key in comparable(world)):
            assert count >= 3
            assert unlike == []


def test_the_number_of_collectives_is_fixed_and_replicas_are_not_asked(results):
    world, ranks = results
    expected = {}
    for name in MAKERS:
        for layout in LAYOUTS[world]:
            count = 0 if layout == "ddp" else COLLECTIVES[name]
            groups = [GROUP[world, layout]] * count if count else []
            for parameters in (13, 201):
                first = AGREEMENTS[world, layout] if count else []
                usual = [count, groups]
                expected[f"{name} {layout} {parameters}"] = [
                    [count + len(first), first + groups],
                    usual,
                ]
    for found in ranks:
        assert found["collectives"] == expected


def test_partial_gradients_of_a_sequence_make_one_collective_more(two):
    for found in two:
        for key, (difference, count) in found["sequence parallel"].items():
            assert difference < 1e-6  # as above
            # Of a first step, with its agreements.
            assert count == COLLECTIVES[key.split()[0]] + 3


def test_all_processes_skip_a_step_together(results):
    world, ranks = results
    for found in ranks:
        # Weights and state to the bit those of a run without the three bad steps.
        assert found["skipping"] == {key: [True, 3.0] for key in runs(world)}


def test_a_grad_scaler_lets_all_processes_skip_together(results):
    for found in results[1]:
        # Powers of two change no digit; 2^10 was halved at each of the two bad steps.
        for name in MAKERS:
            for unscaled in (False, True):
                assert found["scaler"][f"{name} {unscaled}"] == [True, 2.0, 2.0**8]


def test_masters_of_sharded_parameters(results):
    for found in results[1]:
        for difference, kept in found["masters"].values():
            assert kept == 8  # four bfloat16 layers, weight and bias
            # The same gradients, and float32 norms in another order.
            assert difference < 1e-6


def test_the_mixed_precision_policy(results):
    for found in results[1]:
        # One process that rounds where the policy does has the same gradients but for the order of
        # a few float32 sums.
        assert all(value < 1e-6 for value in found["mixed precision"].values())


def test_resumes_to_the_bit_on_the_same_processes(four):
    for found in four:
        for name in MAKERS:
            for form in FORMS:
                tied = [1] * SHARED[name] * 2  # two groups
                assert found["checkpoints"][f"{name} {form}"] == [True, tied]


def check_loaded(found, ways):
    expected = {
        f"{name} {form} {way}": [[], [], [1] * SHARED[name] * 2]
        for name in MAKERS
        for form in FORMS
        for way in ways
        if (form, way) != ("flat", "broadcast")
    }
    assert found == expected


def test_saved_on_four_processes_loaded_on_two(two):
    for found in two:
        check_loaded(found["checkpoints"], ["folder", "file", "broadcast"])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_saved_on_four_processes_loaded_on_one(four, folder):
    check_loaded(optim_checkpoints.load(1, str(folder)), ["folder", "file"])


@pytest.mark.parametrize("world", [2, 4])
def test_zero_redundancy_clips_and_skips_alike(world, tmp_path):
    """Whole parameters on each rank, some ranks without any of a group or with frozen ones only."""
    for found in on_ranks(world, zero_steps.everything, tmp_path):
        for name, one in found.items():
            # A float32 norm added up in another order, 40 steps.
            assert one["difference"] < 1e-6, name
            assert one["resumed"] == 0, name
            for here in (one["here"], one["again"]):
                assert here[0][:2] == one["alone"][0][:2]
                for own, alone in zip(here, one["alone"], strict=True):
                    assert not own or own[0] == 1
                    for numbers, expected in zip(own, alone, strict=False):
                        assert numbers == pytest.approx(expected, rel=1e-5)
