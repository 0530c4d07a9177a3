"""Each formula against a loop that differentiates one example at a time, in float64."""

import pytest
import torch
from torch import Tensor, nn

from steadygrad.noise import example_norms as f

# float64 sums of at most some thousand terms: rounding stays near 1e-13.
TIGHT = {"rtol": 1e-10, "atol": 1e-10}
BATCH = 3


def one_at_a_time(layer: nn.Module, inputs: Tensor, grads: Tensor) -> dict[str, Tensor]:
    """Reference: the layer's gradients of each example, by parameter, with shape [B, *shape]."""
    layer.zero_grad()
    names, parameters = zip(*layer.named_parameters(), strict=True)
    rows = [
        torch.autograd.grad((layer(inputs[i : i + 1]) * grads[i : i + 1]).sum(), parameters)
        for i in range(len(inputs))
    ]
    columns = zip(*rows, strict=True)
    return {name: torch.stack(column) for name, column in zip(names, columns, strict=True)}


def reference(layer: nn.Module, inputs: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    grads = torch.randn_like(layer(inputs), dtype=torch.float64)
    return grads, one_at_a_time(layer, inputs, grads)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def squares(gradients: Tensor) -> Tensor:
    return torch.stack([g.pow(2).sum() for g in gradients])


# T^2 (K + L) against T K L: the first three take the ghost norm, the others form the gradient.
LINEAR_SHAPES = [((), 5, 4), ((1,), 5, 4), ((2,), 9, 8), ((7,), 5, 4), ((3, 4), 5, 1)]


@pytest.mark.parametrize(("between", "wide", "narrow"), LINEAR_SHAPES)
def test_linear(between: tuple[int, ...], wide: int, narrow: int):
    layer = nn.Linear(wide, narrow).double()
    inputs = torch.randn(BATCH, *between, wide, dtype=torch.float64)
    grads, expected = reference(layer, inputs)
    weight, norms = (
        f.linear_gradients(layer, inputs, grads),
        f.linear_sq_norms(layer, inputs, grads),
    )
    torch.testing.assert_close(weight, expected["weight"], **TIGHT)
    torch.testing.assert_close(f.bias_gradients(layer, None, grads), expected["bias"], **TIGHT)
    torch.testing.assert_close(norms, squares(expected["weight"]), **TIGHT)


@pytest.mark.parametrize(("positions", "products"), [(3, 2), (4, 1)])
def test_linear_takes_the_cheaper_way(monkeypatch, positions: int, products: int):
    """K = L = 8: the gradient costs 64 T, two Gram matrices 16 T^2; they meet at T = 4."""
    inputs, grads = torch.randn(2, positions, 8), torch.randn(2, positions, 8)
    calls, bmm = [], torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: calls.append(1) or bmm(a, b))
    f.linear_sq_norms(nn.Linear(8, 8), inputs, grads)
    assert len(calls) == products


@pytest.mark.parametrize("rows", [6, 7, 60])
@pytest.mark.parametrize("padding_idx", [None, 2, 0])
@pytest.mark.parametrize("between", [(), (7,), (2, 3)])
def test_embedding(rows: int, padding_idx: int | None, between: tuple[int, ...]):
    """Few rows are added up, many are renumbered; repeats within an example add up first."""
    layer = nn.Embedding(rows, 4, padding_idx=padding_idx).double()
    indices = torch.randint(0, 6, (BATCH, *between))
    indices.view(-1)[0] = 2
    grads, expected = reference(layer, indices)
    table = f.embedding_gradients(layer, indices, grads)
    torch.testing.assert_close(table, expected["weight"], **TIGHT)
    norms = f.embedding_sq_norms(layer, indices, grads)
    torch.testing.assert_close(norms, squares(expected["weight"]), **TIGHT)


def test_embedding_of_a_huge_table_forms_no_table():
    """2**40 rows would not fit anywhere; int32 indices are looked up too."""
    indices, grads = torch.tensor([[0, 5, 5]], dtype=torch.int32), torch.ones(1, 3, 2)
    norms = f.embedding_sq_norms(nn.Embedding(2**40, 2, device="meta"), indices, grads)
    # Row 0 receives (1, 1), row 5 receives (2, 2).
    torch.testing.assert_close(norms, torch.tensor([10.0]), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6,), (2, 3)])
@pytest.mark.parametrize("between", [(), (4,), (2, 2)])
def test_layer_norm(shape: tuple[int, ...], between: tuple[int, ...]):
    layer = nn.LayerNorm(shape, eps=1e-3).double()
    nn.init.normal_(layer.weight)
    inputs = torch.randn(BATCH, *between, *shape, dtype=torch.float64)
    grads, expected = reference(layer, inputs)
    weight = f.norm_gradients(layer, inputs, grads)
    torch.testing.assert_close(weight, expected["weight"], **TIGHT)
    torch.testing.assert_close(f.bias_gradients(layer, None, grads), expected["bias"], **TIGHT)


@pytest.mark.parametrize("eps", [None, 1e-2])
@pytest.mark.parametrize("shape", [(6,), (2, 3)])
def test_rms_norm(shape: tuple[int, ...], eps: float | None):
    layer = nn.RMSNorm(shape, eps=eps).double()
    inputs = torch.randn(BATCH, 4, *shape, dtype=torch.float64)
    grads, expected = reference(layer, inputs)
    weight = f.norm_gradients(layer, inputs, grads)
    torch.testing.assert_close(weight, expected["weight"], **TIGHT)


def test_rms_norm_default_eps_is_the_inputs_own():
    """Tiny float32 inputs show which eps was added: float32's, although sums may be wider."""
    layer = nn.RMSNorm(4)
    inputs = 1e-4 * torch.randn(BATCH, 4)
    grads = torch.randn(BATCH, 4)
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
    grads, expected = reference(layer, inputs)
    weight = f.conv_gradients(layer, inputs, grads)
    torch.testing.assert_close(weight, expected["weight"], **TIGHT)
    norms = f.conv_sq_norms(layer, inputs, grads)
    torch.testing.assert_close(norms, squares(expected["weight"]), **TIGHT)
    torch.testing.assert_close(f.bias_gradients(layer, None, grads), expected["bias"], **TIGHT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [4, 20])
def test_half_precision_is_widened(dtype: torch.dtype, width: int):
    """300^2 overflows float16; eight positions of it overflow it by far."""
    inputs, grads = (torch.full((2, 8, width), value, dtype=dtype) for value in (300.0, 1.0))
    value = float(inputs[0, 0, 0])
    expected = torch.full((2,), width**2 * (8 * value) ** 2)
    layer = nn.Linear(width, width)
    norms = f.linear_sq_norms(layer, inputs, grads)
    assert norms.dtype == torch.float32
    # One float32 rounding for each of a few sums.
    torch.testing.assert_close(norms, expected, rtol=1e-6, atol=0)
    # bfloat16 cannot count to 257: the sum itself must be wide.
    ones = torch.ones(1, 257, 1, dtype=dtype)
    assert f.bias_gradients(layer, None, ones).item() == 257


def test_layouts_and_empty_batches():
    """Transposed memory gives the same numbers; no examples give no numbers."""
    inputs = torch.randn(4, BATCH, 6, dtype=torch.float64).transpose(0, 1)
    grads = torch.randn(BATCH, 2, 4, dtype=torch.float64).transpose(1, 2)
    assert not inputs.is_contiguous()
    torch.testing.assert_close(
        f.linear_gradients(None, inputs, grads),
        torch.stack([g.T @ a for g, a in zip(grads, inputs, strict=True)]),
        **TIGHT,
    )
    images, empty = torch.randn(0, 2, 5, 5), torch.randn(0, 4, 6)
    conv = nn.Conv2d(2, 2, 3, padding=1)
    rows = torch.zeros(0, 4, dtype=torch.long)
    assert f.conv_gradients(conv, images, images).shape == (0, 2, 2, 3, 3)
    assert f.conv_sq_norms(conv, images, images).shape == (0,)
    assert f.linear_sq_norms(None, empty, empty).shape == (0,)
    for count in (3, 1000):
        table = nn.Embedding(count, 6)
        assert f.embedding_sq_norms(table, rows, empty).shape == (0,)
    assert f.norm_gradients(nn.LayerNorm(6), empty, empty).shape == (0, 6)


def test_inputs_are_left_alone():
    """The normalized input is multiplied in place, the given one never."""
    inputs, grads = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    before = inputs.clone(), grads.clone()
    for layer in (nn.LayerNorm(4), nn.RMSNorm(4)):
        f.norm_gradients(layer, inputs, grads)
    assert torch.equal(inputs, before[0])
    assert torch.equal(grads, before[1])
