"""Taps against a loop that runs the model on one example at a time, and what they refuse."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadygrad._checks import InputError
from steadygrad.noise.per_example import ExampleNorms
from tests.unit.nets import Net

# float64 throughout unless a test says otherwise; sums have at most some thousand terms.
TIGHT = {"rtol": 1e-10, "atol": 1e-12}
BATCH, WIDTH, ROWS = 4, 6, 7
# T (K + L) against K L: at 2 positions Gram matrices are cheaper, at 14 the gradients themselves.
POSITIONS = [2, 14]

Norms = dict[str, Tensor]


@pytest.fixture(autouse=True)
def _double():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Tiny(nn.Module):
    """Every supported kind of layer; ``tie``, ``reuse`` and ``mode`` bend it."""

    def __init__(self, tie: bool = False, reuse: int = 1, mode: str = "") -> None:
        super().__init__()
        self.reuse, self.mode = reuse, mode
        self.embed = nn.Embedding(ROWS, WIDTH, padding_idx=0)
        self.place = nn.Embedding(20, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.rms = nn.RMSNorm(WIDTH)
        self.conv = nn.Conv1d(WIDTH, 4, 3, padding=1)
        self.image = nn.Conv2d(1, 2, 2, bias=False)
        self.head = nn.Linear(WIDTH, ROWS)
        self.small = nn.Linear(2, 1)
        if tie:
            self.head.weight = self.embed.weight

    def block(self, x: Tensor) -> Tensor:
        x = x + F.relu(self.mix(input=self.norm(x)), inplace=True)
        x[:, 0].mul_(3)
        return x.add_(1).chunk(1)[0] * 0.5

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows) + self.place(torch.arange(rows.shape[1]).expand(rows.shape))
        for _ in range(self.reuse):
            if self.mode:
                x = checkpoint(self.block, x, use_reentrant=self.mode == "reentrant")
            else:
                x = self.block(x)
        waves = self.conv(self.rms(x).transpose(1, 2)).relu_()
        dots = self.image(waves.unsqueeze(1)).mean((2, 3))
        return self.head(x).flatten(1).sum(1).tanh() + self.small(dots).squeeze(1)


def rows_of(positions: int) -> Tensor:
    return torch.randint(0, ROWS, (BATCH, positions))


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().sum() / BATCH


def looped(model: nn.Module, batch: Tensor) -> Norms:
    """Reference: each example alone, through an untapped copy."""
    model, sums = copy.deepcopy(model), {}
    for i in range(len(batch)):
        model.zero_grad()
        loss_of(model, batch[i : i + 1]).backward()
        for name, gradient in gradients(model).items():
            sums[name] = sums.get(name, 0) + gradient.square().sum()
    return sums


def measured(
    taps: ExampleNorms, model: nn.Module, batch: Tensor, loss: Callable[..., Tensor] = loss_of
) -> Norms:
    value = loss(model, batch)
    with taps.recording(len(batch)) as found:
        value.backward()
    return found


def gradients(model: nn.Module) -> Norms:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(found: Norms, expected: Norms, **tolerance: float) -> None:
    torch.testing.assert_close(found, expected, **(tolerance or TIGHT))


def assert_measures(model: nn.Module, batch: Tensor) -> None:
    """Norms equal the loop's, and training sees the gradients that it would see untapped."""
    expected, plain = looped(model, batch), copy.deepcopy(model)
    loss_of(plain, batch).backward()
    taps = ExampleNorms(model)
    # The first pass is audited, the second is not.
    for _ in range(2):
        model.zero_grad()
        assert_same(measured(taps, model, batch), expected)
        assert_same(gradients(model), gradients(plain))


@pytest.mark.few(12)
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("mode", ["", "non-reentrant", "reentrant"])
@pytest.mark.parametrize("reuse", [1, 3])
@pytest.mark.parametrize("tie", [False, True])
def test_equals_the_loop(positions: int, mode: str, reuse: int, tie: bool):
    model = Tiny(tie, reuse, mode)
    assert ExampleNorms(copy.deepcopy(model)).parameter_names == [
        name for name, _ in model.named_parameters()
    ]
    assert_measures(model, rows_of(positions))


@pytest.mark.parametrize("frozen", ["mix.weight", "mix.bias", "norm.weight", "conv.weight"])
def test_frozen_parameters_are_left_out(frozen: str):
    model, batch = Tiny(), rows_of(14)
    early = ExampleNorms(model)
    model.get_parameter(frozen).requires_grad_(False)
    # Also where it is frozen after the taps were set.
    assert_same(measured(early, model, batch), looped(model, batch))
    assert frozen not in ExampleNorms(model).parameter_names
    assert_measures(model, batch)


@pytest.mark.parametrize("forward_first", [True, False])
def test_two_losses_of_the_same_examples_in_one_recording(forward_first: bool):
    model, batch = Tiny(), rows_of(5)
    taps, expected = ExampleNorms(model), looped(model, batch)

    def twice() -> Norms:
        with taps.recording(BATCH) as found:
            first = loss_of(model, batch)
            second = loss_of(model, batch) if forward_first else None
            first.backward()
            (loss_of(model, batch) if second is None else second).backward()
        return found

    if not forward_first:
        # A second use after the norm was taken: refused once.
        with pytest.raises(RuntimeError, match="`small`"):
            twice()
    # Each example's gradient is twice as long.
    assert_same(twice(), {name: 4 * value for name, value in expected.items()})


# Among autograd's other features


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype):
    """Inputs and output gradients differ in dtype; backward may run inside autocast as well."""
    torch.set_default_dtype(torch.float32)
    model = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 4))
    batch = torch.randn(BATCH, 40, 16)
    expected, taps = looped(model, batch), ExampleNorms(model)
    with torch.autocast("cpu", dtype):
        found = measured(taps, model, batch)
    assert all(value.dtype == torch.float32 for value in found.values())
    # bfloat16 keeps 8 bits, 2**-8 a rounding, some of them in a row.
    assert_same(found, expected, rtol=0.05, atol=0)


def test_other_hooks_on_the_layer():
    """Hooks that change the output, set before or after, keep their part of the graph."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 5))
    factor = torch.tensor(3.0, requires_grad=True)
    model[0].register_forward_hook(lambda m, a, out: out * factor)
    model[1].register_full_backward_hook(lambda m, gi, go: (2 * gi[0],))
    assert_measures(model, torch.randn(BATCH, 14, 6))


# What cannot be measured


def test_only_the_first_good_recording_waits_for_the_device(monkeypatch):
    """An overflowed pass does not count as one."""
    model, batch = Tiny(), rows_of(5)
    taps, reads, read = ExampleNorms(model), [], Tensor.tolist
    monkeypatch.setattr(Tensor, "tolist", lambda x: reads.append(1) or read(x))
    counts = []
    for factor in (float("inf"), 1.0, 1.0):
        model.zero_grad()
        measured(taps, model, batch, lambda m, b, c=factor: loss_of(m, b) * c)
        counts.append(len(reads))
    assert counts == [1, 2, 2]


def plain(own: Net, x: Tensor) -> Tensor:
    return own.mix(x).sum((1, 2))


# What a model does with its embedded rows, and the name of the layer or weight that is refused: its
# first dimension is not the examples, or it is not called at all.
ODD = {
    "positions": (lambda own, x: plain(own, x + own.place(torch.arange(x.shape[1]))), "`place`"),
    "one vector": (lambda own, x: own.mix(x.sum((0, 1))).sum().expand(len(x)), "`mix`"),
    "bypassed": (lambda own, x: (x @ own.mix.weight.T).sum((1, 2)), r"`mix\.weight`"),
    "also bypassed": (
        lambda own, x: plain(own, x) + (x @ own.embed.weight.T).sum((1, 2)),
        r"`embed\.weight`",
    ),
    "hooked": (plain, r"`mix\.weight`"),
    "compiled": (plain, "_orig_mod"),
}


# torch warns itself while it traces a tensor that is no leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
@pytest.mark.parametrize("how", ODD)
def test_what_cannot_be_measured_is_refused(how: str):
    code, name = ODD[how]
    layers = {"place": nn.Embedding(5, WIDTH), "embed": nn.Embedding(ROWS, WIDTH)}
    layers["mix"] = nn.Linear(WIDTH, ROWS, bias=False)
    model, batch = Net(lambda own, rows: code(own, own.embed(rows)), **layers), rows_of(5)
    if how == "compiled":
        model.mix = torch.compile(model.mix, backend="eager")
    taps = ExampleNorms(model)
    if how == "hooked":  # ahead of the tap
        model.mix.register_forward_hook(lambda m, a, out: 3 * out, prepend=True)
    for _ in range(2):  # the next recording is examined again, and adds to gradients
        with pytest.raises(InputError, match=name):
            measured(taps, model, batch)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Extended(nn.Linear):
    """Computes what nn.Linear computes, and holds a parameter that somebody else uses."""

    def __init__(self, wide: int, narrow: int) -> None:
        super().__init__(wide, narrow)
        self.gain = nn.Parameter(torch.ones(()))


@pytest.mark.parametrize(
    ("layer", "parameter", "where"),
    [
        (nn.LSTM(4, 4), "weight_ih_l0", "1"),
        (nn.Embedding(3, 4, scale_grad_by_freq=True), "weight", "1"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), "original0", "1.para.*"),
        (Scaled(4, 4), "weight", "1"),
        (Extended(4, 4), "gain", "1"),
    ],
)
def test_unsupported_layers_are_refused_by_name(layer: nn.Module, parameter: str, where: str):
    model = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(InputError, match=f"`{parameter}` in layer `{where}`"):
        ExampleNorms(model)
    assert all(not m._forward_hooks for m in model.modules())
    layer.requires_grad_(False)
    assert ExampleNorms(model).parameter_names == ["0.weight", "0.bias"]
