"""Each formula against a loop that differentiates one example at a time, in float64."""

import pytest
import torch
from torch import Tensor, nn

from steadygrad.noise import example_norms as f

# float64 sums of at most some thousand terms: rounding stays near 1e-13.
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
BATCH = 3


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def one_at_a_time(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """The layer's gradients of each example, by parameter, with shape [B, *shape]."""
    names, parameters = zip(*layer.named_parameters(), strict=True)
    rows = [
        torch.autograd.grad((layer(inputs[i : i + 1]) * grads[i : i + 1]).sum(), parameters)
        for i in range(len(inputs))
    ]
    columns = zip(*rows, strict=True)
    return {name: torch.stack(column) for name, column in zip(names, columns, strict=True)}


def check(layer: nn.Module, inputs: Tensor, gradients, sq_norms=None):
    """Compares both formulas of the weight, and that of the bias, with the loop."""
    grads = torch.randn_like(layer(inputs), dtype=torch.float64)
    expected = one_at_a_time(layer, inputs, grads)
    weight = expected["weight"]
    torch.testing.assert_close(gradients(layer, inputs, grads), weight, **TIGHT)
    if "bias" in expected:
        torch.testing.assert_close(f.bias_gradients(layer, None, grads), expected["bias"], **TIGHT)
    if sq_norms is not None:
        norms = sq_norms(layer, inputs, grads)
        torch.testing.assert_close(norms, weight.flatten(1).square().sum(1), **TIGHT)


# T^2 (K + L) against T K L: the first three take the ghost norm, the others form the gradient.
LINEAR_SHAPES = [((), 5, 4), ((1,), 5, 4), ((2,), 9, 8), ((7,), 5, 4), ((3, 4), 5, 1)]


@pytest.mark.parametrize(("between", "wide", "narrow"), LINEAR_SHAPES)
def test_linear(between: tuple[int, ...], wide: int, narrow: int):
    inputs = torch.randn(BATCH, *between, wide, dtype=torch.float64)
    check(nn.Linear(wide, narrow).double(), inputs, f.linear_gradients, f.linear_sq_norms)


@pytest.mark.parametrize(("positions", "products"), [(3, 2), (4, 1)])
def test_linear_takes_the_cheaper_way(monkeypatch, positions: int, products: int):
    """K = L = 8: the gradient costs 64 T, two Gram matrices 16 T^2; they meet at T = 4."""
    inputs, grads = torch.randn(2, positions, 8), torch.randn(2, positions, 8)
    calls, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: calls.append(1) or bmm(a, b))
    f.linear_sq_norms(nn.Linear(8, 8), inputs, grads)
    assert len(calls) == products


@pytest.mark.parametrize("rows", [6, 60])
@pytest.mark.parametrize("padding_idx", [None, 2, 0])
@pytest.mark.parametrize("between", [(), (7,), (2, 3)])
def test_embedding(rows: int, padding_idx: int | None, between: tuple[int, ...]):
    """Few rows are added up, many are renumbered; repeats within an example add up first."""
    layer = nn.Embedding(rows, 4, padding_idx=padding_idx).double()
    indices = torch.randint(0, 6, (BATCH, *between))
    indices.view(-1)[0] = 2
    check(layer, indices, f.embedding_gradients, f.embedding_sq_norms)


def test_embedding_of_a_huge_table_forms_no_table():
    """2**40 rows would not fit anywhere; int32 indices are looked up too."""
    indices, grads = torch.tensor([[0, 5, 5]], dtype=torch.int32), torch.ones(1, 3, 2)
    norms = f.embedding_sq_norms(nn.Embedding(2**40, 2, device="meta"), indices, grads)
    # Row 0 receives (1, 1), row 5 receives (2, 2).
    torch.testing.assert_close(norms, torch.tensor([10.0]), rtol=0, atol=0)


@pytest.mark.parametrize("kind", [nn.LayerNorm, nn.RMSNorm])
@pytest.mark.parametrize("eps", [1e-2, None])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("between", [(), (2, 2)])
def test_norms(kind, eps: float | None, shape: tuple[int, ...], between: tuple[int, ...]):
    layer = kind(shape, **({} if eps is None else {"eps": eps})).double()
    nn.init.normal_(layer.weight)
    inputs, grads = torch.randn(2, BATCH, *between, *shape, dtype=torch.float64)
    before = inputs.clone(), grads.clone()
    check(layer, inputs, f.norm_gradients)
    f.norm_gradients(layer, inputs, grads)
    # The normalized input is multiplied in place, the given one never.
    assert torch.equal(inputs, before[0])
    assert torch.equal(grads, before[1])


def test_rms_norm_default_eps_is_the_inputs_own():
    """Tiny float32 inputs show which eps was added: float32's, although sums may be wider."""
    layer = nn.RMSNorm(4)
    inputs, grads = 1e-4 * torch.randn(BATCH, 4), torch.randn(BATCH, 4)
    expected = one_at_a_time(layer, inputs, grads)["weight"]
    # float32 rounding of a handful of operations.
    weight = f.norm_gradients(layer, inputs, grads)
    torch.testing.assert_close(weight, expected, rtol=1e-5, atol=1e-6)


CONVOLUTIONS = {
    "plain": {},
    "stride": {"stride": 2, "padding": 1},
    "leftover": {"stride": 3},
    "dilation": {"dilation": 2, "padding": 2},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4, "out_channels": 8},
    "same": {"padding": "same", "kernel_size": 4},
    "same-dilated": {"padding": "same", "kernel_size": 2, "dilation": 3},
    "valid": {"padding": "valid"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect-same": {"padding": "same", "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate", "stride": 2},
}
UNEVEN_2D = {
    "uneven": {
        "kernel_size": (1, 3),
        "stride": (2, 1),
        "padding": (0, 2),
        "dilation": (1, 2),
        "groups": 2,
    },
    "uneven-same": {"kernel_size": (2, 5), "padding": "same", "dilation": (3, 1)},
    "uneven-circular": {"padding": (1, 2), "padding_mode": "circular"},
}
CASES = [(1, key, case) for key, case in CONVOLUTIONS.items()]
CASES += [(2, key, case) for key, case in (CONVOLUTIONS | UNEVEN_2D).items()]


# torch announces a copy that it makes itself for uneven "same" padding.
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("dims", "options"), [c[::2] for c in CASES], ids=[f"{c[0]}d-{c[1]}" for c in CASES]
)
def test_convolution(dims: int, options: dict[str, object]):
    kind = nn.Conv1d if dims == 1 else nn.Conv2d
    layer = kind(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options}).double()
    inputs = torch.randn(BATCH, 4, *(9, 8)[:dims], dtype=torch.float64)
    check(layer, inputs, f.conv_gradients, f.conv_sq_norms)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 20])
def test_half_precision_is_widened(dtype: torch.dtype, width: int):
    """300^2 overflows float16; eight positions of it overflow it by far."""
    inputs, grads = (torch.full((2, 8, width), value, dtype=dtype) for value in (300.0, 1.0))
    expected = torch.full((2,), width**2 * (8 * float(inputs[0, 0, 0])) ** 2)
    norms = f.linear_sq_norms(nn.Linear(width, width), inputs, grads)
    assert norms.dtype == torch.float32
    # One float32 rounding for each of a few sums.
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    # bfloat16 cannot count to 257: the sum itself must be wide.
    ones = torch.ones(1, 257, 1, dtype=dtype)
    assert f.bias_gradients(nn.Linear(1, 1), None, ones).item() == 257


def test_layouts_and_empty_batches():
    """Transposed memory gives the same numbers; no examples give no numbers."""
    inputs = torch.randn(4, BATCH, 6, dtype=torch.float64).transpose(0, 1)
    assert not inputs.is_contiguous()
    check(nn.Linear(6, 4).double(), inputs, f.linear_gradients)
    images, empty = torch.randn(0, 2, 5, 5), torch.randn(0, 4, 6)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    rows = torch.zeros(0, 4, dtype=torch.long)
    assert f.conv_gradients(conv, images, images).shape == (0, 2, 2, 3, 3)
    assert f.conv_sq_norms(conv, images, images).shape == (0,)
    assert f.linear_sq_norms(None, empty, empty).shape == (0,)
    for count in (3, 1000):
        assert f.embedding_sq_norms(nn.Embedding(count, 6), rows, empty).shape == (0,)
    assert f.norm_gradients(nn.LayerNorm(6), empty, empty).shape == (0, 6)
