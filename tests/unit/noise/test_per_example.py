"""Taps against a loop that runs the model on one example at a time."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from steadygrad.noise import per_example
from steadygrad.noise.per_example import ExampleNorms
from tests.unit.noise import example_models as ex

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("positions", ex.POSITIONS)
@pytest.mark.parametrize("mode", ["", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("reuse", [1, 3])
@pytest.mark.parametrize("tie", [False, True])
def test_equals_the_loop(positions: int, mode: str, reuse: int, tie: bool):
    ex.assert_measures(ex.Tiny(tie, reuse, mode), ex.rows_of(positions))


def test_names_are_the_models_own():
    model = ex.Tiny(tie=True)
    assert ExampleNorms(model).parameter_names == [n for n, _ in model.named_parameters()]


@pytest.mark.parametrize("positions", ex.POSITIONS)
@pytest.mark.parametrize("frozen", ["mix.weight", "mix.bias", "norm.weight", "conv.weight"])
def test_frozen_parameters_are_left_out(positions: int, frozen: str):
    model = ex.Tiny()
    model.get_parameter(frozen).requires_grad_(False)
    assert frozen not in ExampleNorms(model).parameter_names
    ex.assert_measures(model, ex.rows_of(positions))


@pytest.mark.parametrize("positions", ex.POSITIONS)
def test_frozen_or_freed_after_the_taps_were_set(positions: int):
    model, batch = ex.Tiny(), ex.rows_of(positions)
    taps = ExampleNorms(model)
    for parameter in (model.mix.weight, model.head.bias, model.norm.weight):
        parameter.requires_grad_(False)
    ex.assert_same(ex.measured(taps, model, batch), ex.looped(model, batch))


def test_a_loss_scale_enters_squared():
    model, batch = ex.Tiny(), ex.rows_of(5)
    expected = {name: 64 * value for name, value in ex.looped(model, batch).items()}
    found = ex.measured(ExampleNorms(model), model, batch, lambda m, b: 8 * ex.loss_of(m, b))
    ex.assert_same(found, expected)


def test_backward_outside_a_recording_is_not_measured():
    model, batch = ex.Tiny(), ex.rows_of(14)
    taps, plain = ExampleNorms(model), copy.deepcopy(model)
    for m in (model, plain):
        ex.loss_of(m, batch).backward()
    ex.assert_same(ex.gradients(model), ex.gradients(plain))
    # The calls that it made are forgotten: nothing is held as if the layers were reused.
    expected = ex.looped(model, batch)
    model.zero_grad()
    ex.assert_same(ex.measured(taps, model, batch), expected)


def test_forward_passes_ahead_of_backward_passes():
    """Pipelined micro-batches: two forward passes, then two recordings."""
    model, batches = ex.Tiny(tie=True, reuse=2), [ex.rows_of(14), ex.rows_of(14)]
    taps = ExampleNorms(model)
    values = [ex.loss_of(model, batch) for batch in batches]
    for value, batch in zip(values, batches, strict=True):
        expected = ex.looped(model, batch)
        with taps.recording(ex.BATCH) as found:
            value.backward()
        ex.assert_same(found, expected)


def test_two_losses_of_the_same_examples_in_one_recording():
    model, batch = ex.Tiny(), ex.rows_of(5)
    taps, expected = ExampleNorms(model), ex.looped(model, batch)
    with taps.recording(ex.BATCH) as found:
        first, second = ex.loss_of(model, batch), ex.loss_of(model, batch)
        first.backward()
        second.backward()
    # Each example's gradient is twice as long.
    ex.assert_same(found, {name: 4 * value for name, value in expected.items()})


def test_a_second_use_after_the_norm_was_taken_is_refused_once():
    model, batch = ex.Tiny(), ex.rows_of(5)
    taps, expected = ExampleNorms(model), ex.looped(model, batch)

    def twice() -> ex.Norms:
        with taps.recording(ex.BATCH) as found:
            ex.loss_of(model, batch).backward()
            ex.loss_of(model, batch).backward()
        return found

    with pytest.raises(RuntimeError, match=r"`small`.*Remedy: add the losses"):
        twice()
    ex.assert_same(twice(), {name: 4 * value for name, value in expected.items()})


# torch warns of a checkpoint that has nothing to differentiate.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("mode", ["", "non-reentrant", "reentrant"])
def test_only_layers_in_use_several_times_hold_matrices(monkeypatch, mode: str):
    """Neither recomputation, nor passes that nobody measured, make a layer look reused."""
    model, batch = ex.Tiny(mode=mode), ex.rows_of(5)
    taps, held, add = ExampleNorms(model), set(), per_example._add

    def spy(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
        if sums is taps._held and value.dim() > 2:
            held.add(name)
        add(sums, name, value)

    monkeypatch.setattr(per_example, "_add", spy)
    for _ in range(2):
        ex.loss_of(model, batch).backward()
        ex.measured(taps, model, batch)
        model.eval()
        with torch.no_grad():
            model(batch)
        model.train()
    assert held == set()
    with torch.no_grad():
        model.head(torch.zeros(ex.BATCH, 1, ex.WIDTH))
    ex.measured(taps, model, batch)
    # A call without gradients may be checkpointing's: it counts, for one recording.
    assert held == {"head.weight"}
    held.clear()
    ex.measured(taps, model, batch)
    assert held == set()


def test_what_is_compared_is_one_gradient_not_one_for_each_example(monkeypatch):
    """Where the norms need no gradient: of an embedding of a whole vocabulary it would be huge."""
    model, sizes, bmm = nn.Linear(40, 40), [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda *x: sizes.append(bmm(*x).numel()) or bmm(*x))
    ex.measured(ExampleNorms(model), model, torch.randn(ex.BATCH, 2, 40))
    assert max(sizes) == 40 * 40


def test_evaluation_between_steps_changes_nothing():
    model, batch = ex.Tiny(), ex.rows_of(5)
    taps, expected = ExampleNorms(model), ex.looped(model, batch)
    with torch.no_grad():
        assert not model(batch).requires_grad
    ex.assert_same(ex.measured(taps, model, batch), expected)
    model.eval()
    with torch.inference_mode():
        model(batch)
    ex.assert_same(ex.measured(taps, model, batch), expected)


def test_empty_batch():
    model = ex.Tiny()
    taps = ExampleNorms(model)
    found = ex.measured(taps, model, ex.rows_of(14, batch=0))
    assert found.keys() == set(taps.parameter_names)
    assert all(value == 0 for value in found.values())


@pytest.fixture
def _one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
@pytest.mark.parametrize("kind", ["ddp", "fsdp", "fsdp-checkpoint"])
def test_wrapped_models(kind: str):
    model, batch = ex.Tiny(mode="non-reentrant" if "checkpoint" in kind else ""), ex.rows_of(14)
    expected = ex.looped(model, batch)
    if kind == "ddp":
        wrapped: nn.Module = nn.parallel.DistributedDataParallel(model)
        expected = {f"module.{name}": value for name, value in expected.items()}
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (1,))
        fully_shard(model.mix, mesh=mesh)
        wrapped = fully_shard(model, mesh=mesh)
    taps = ExampleNorms(wrapped)
    for _ in range(2):
        ex.assert_same(ex.measured(taps, wrapped, batch), expected)
