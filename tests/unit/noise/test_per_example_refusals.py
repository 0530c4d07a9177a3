"""Modules that taps cannot measure are refused by name, with a remedy."""

import copy

import pytest
import torch
from torch import Tensor, nn

from steadygrad._checks import InputError
from steadygrad.noise.per_example import ExampleNorms
from tests.unit.noise import example_models as ex

pytestmark = pytest.mark.usefixtures("double")


@pytest.mark.parametrize("positions", ex.POSITIONS)
def test_a_hook_ahead_of_the_tap_is_noticed(positions: int):
    model, batch = nn.Sequential(nn.Linear(6, 6)), torch.randn(ex.BATCH, positions, 6)
    taps = ExampleNorms(model)
    model[0].register_forward_hook(lambda m, a, out: 3 * out, prepend=True)
    plain = copy.deepcopy(model)
    ex.loss_of(plain, batch).backward()
    with pytest.raises(InputError, match=r"`0\..*difference"):
        ex.measured(taps, model, batch)
    ex.assert_same(ex.gradients(model), ex.gradients(plain))


def test_only_the_first_good_recording_waits_for_the_device(monkeypatch):
    """An overflowed pass does not count as one."""
    model, batch = ex.Tiny(), ex.rows_of(5)
    taps, reads, read = ExampleNorms(model), [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: reads.append(1) or read(x))
    counts = []
    for factor in (float("inf"), 1.0, 1.0):
        model.zero_grad()
        ex.measured(taps, model, batch, lambda m, b, c=factor: ex.loss_of(m, b) * c)
        counts.append(len(reads))
    assert counts == [1, 2, 2]


class Ahead(nn.Module):
    """A module whose first dimension is not the examples, or which is not called at all."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.place = how, nn.Embedding(5, ex.WIDTH)
        self.embed, self.mix = (
            nn.Embedding(ex.ROWS, ex.WIDTH),
            nn.Linear(ex.WIDTH, ex.ROWS, bias=False),
        )

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows)
        if self.how == "positions":
            x = x + self.place(torch.arange(rows.shape[1]))
        if self.how == "bypassed":
            return (x @ self.mix.weight.T).sum((1, 2))
        if self.how == "also bypassed":
            return (self.mix(x) + x @ self.embed.weight.T).sum((1, 2))
        if self.how == "penalty":
            return self.mix(x).sum((1, 2)) + 10 * self.mix.weight.square().sum()
        if self.how == "one vector":
            return self.mix(x.sum((0, 1))).sum().expand(len(rows))
        if self.how == "sequence first":
            return self.mix(x.transpose(0, 1)).sum((0, 2))
        return self.mix(x).sum((1, 2))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("positions", r"`place`.*4 examples"),
        ("sequence first", r"`mix`.*\(5, 4, 7\)"),
        ("one vector", r"`mix`.*\(7,\)"),
        ("bypassed", "`mix.weight`.*compile"),
        ("also bypassed", "`embed.weight`.*difference"),
        ("penalty", "`mix.weight`.*difference"),
    ],
)
def test_what_cannot_be_measured_is_refused(how: str, message: str):
    model = Ahead(how)
    taps = ExampleNorms(model)
    with pytest.raises(InputError, match=message):
        ex.measured(taps, model, ex.rows_of(5))
    # The next recording is examined again.
    with pytest.raises(InputError, match=message):
        ex.measured(taps, model, ex.rows_of(5))


def test_a_bypassed_layer_is_noticed_in_accumulated_gradients():
    """Later micro-batches add to a gradient that is there already."""
    model, batch = Ahead("bypassed"), ex.rows_of(5)
    model.how = ""
    taps = ExampleNorms(model)
    ex.loss_of(model, batch).backward()
    model.how = "bypassed"
    with pytest.raises(InputError, match="mix"):
        ex.measured(taps, model, batch)


# torch warns itself while it traces a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_compiled_regions_are_refused_by_name():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    model[1] = torch.compile(model[1], backend="eager")
    taps, batch = ExampleNorms(model), torch.randn(ex.BATCH, 3, 6)
    with pytest.raises(InputError, match="_orig_mod"):
        ex.measured(taps, model, batch)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Extended(nn.Linear):
    """Computes what nn.Linear computes, and holds a parameter that somebody else uses."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__(wide, narrow)
        self.gain = nn.Parameter(torch.ones(()))


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.place = nn.Parameter(torch.zeros(3))
        self.mix = nn.Linear(2, 2)


def attention_with_frozen_projection() -> nn.Module:
    attention = nn.MultiheadAttention(4, 2)
    attention.in_proj_weight.requires_grad_(False)
    attention.in_proj_bias.requires_grad_(False)
    return attention


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.MultiheadAttention(4, 2), "`in_proj_weight` in layer `1`"),
        (attention_with_frozen_projection(), r"layer `1.out_proj` \(NonDynamically"),
        (nn.BatchNorm1d(4), r"layer `1` \(BatchNorm1d\)"),
        (nn.LSTM(4, 4), r"layer `1` \(LSTM\)"),
        (nn.Conv3d(1, 1, 1), r"layer `1` \(Conv3d\)"),
        (nn.Embedding(3, 4, scale_grad_by_freq=True), r"layer `1` \(Embedding\)"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), r"`original0` in layer `1\.para"),
        (Scaled(4, 4), r"`weight` in layer `1` \(Scaled\)"),
        (Extended(4, 4), r"`gain` in layer `1` \(Extended\)"),
        (Root(), r"`place` in layer `1` \(Root\)"),
    ],
)
def test_unsupported_layers_are_refused_by_name(layer: nn.Module, message: str):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(InputError, match=message):
        ExampleNorms(model)
    assert all(not m._forward_hooks for m in model.modules())
    layer.requires_grad_(False)
    assert ExampleNorms(model).parameter_names == ["0.weight", "0.bias"]


def test_a_parameter_of_the_model_itself_is_refused():
    with pytest.raises(InputError, match=r"`place` in the model itself \(Root\)"):
        ExampleNorms(Root())
