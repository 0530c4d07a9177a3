"""Every layer's formulas, through the taps, against one example at a time."""

import pytest
import torch
from torch import nn

from steadygrad.noise import example_norms as f
from tests.unit.noise.test_per_example import BATCH, assert_measures

UNEVEN = {
    "kernel_size": (1, 3),
    "stride": (2, 1),
    "padding": (0, 2),
    "dilation": (1, 2),
    "groups": 2,
}
CONVOLUTIONS = [
    {"stride": 3},  # columns are left over
    {"dilation": 2, "padding": 2},
    {"groups": 4, "out_channels": 8},
    {"padding": "same", "kernel_size": 4},
    {"padding": "same", "kernel_size": 2, "dilation": 3},
    {"padding": "valid"},
    {"padding": 1, "padding_mode": "circular"},
    {"padding": "same", "padding_mode": "reflect"},
    {"padding": 2, "padding_mode": "replicate", "stride": 2},
]
UNEVEN_CONVOLUTIONS = [
    UNEVEN,
    {"kernel_size": (2, 5), "padding": "same", "dilation": (3, 1)},
    {"padding": (1, 2), "padding_mode": "circular"},
]


def convolution(kind, options):
    return kind(**{"in_channels": 4, "out_channels": 6, "kernel_size": 3, **options})


# Layers, and the shape of an example: positions first.
LAYERS = [
    # T^2 (K + L) against T K L: the first three take the ghost norm, the others form the gradient.
    *((nn.Linear(5, 4), (*between, 5)) for between in ((), (1,))),
    (nn.Linear(9, 8), (2, 9)),
    (nn.Linear(5, 4), (7, 5)),
    (nn.Linear(5, 1), (3, 4, 5)),
    # Few rows are added up, many are renumbered; repeats within an example add up first.
    *(
        (nn.Embedding(rows, 4, padding_idx=padding), between)
        for rows in (6, 60)
        for padding in (None, 2, 0)
        for between in ((), (7,), (2, 3))
    ),
    *(
        (kind(shape, eps=1e-2), (*between, *shape))
        for kind in (nn.LayerNorm, nn.RMSNorm)
        for shape in ((6,), (2, 3))
        for between in ((), (2, 2))
    ),
    *((convolution(nn.Conv1d, options), (4, 9)) for options in CONVOLUTIONS),
    *(
        (convolution(nn.Conv2d, options), (4, 9, 8))
        for options in CONVOLUTIONS + UNEVEN_CONVOLUTIONS
    ),
]


class Called(nn.Module):
    """A layer that is called several times holds its examples' gradients, and one call needs none.

    The weight before it sees whether the layer's own gradients are left alone.
    """

    def __init__(self, layer, times):
        super().__init__()
        self.layer, self.times = layer, times
        self.before = nn.Linear(1, 1)

    def forward(self, x):
        if x.is_floating_point():
            x = self.before(x.unsqueeze(-1)).squeeze(-1)
        return sum(self.layer(x) for _ in range(self.times))


# torch announces a copy that it makes itself for uneven "same" padding.
@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize(("layer", "shape"), LAYERS, ids=str)
def test_layer(layer, shape, times):
    torch.manual_seed(0)
    x = torch.randn(BATCH, *shape, dtype=torch.float64)
    if isinstance(layer, nn.Embedding):
        x = torch.randint(0, 6, (BATCH, *shape))
        x.view(-1)[0] = 2
    assert_measures(Called(layer, times).double(), x)


def test_rms_norm_default_eps_is_the_inputs_own():
    """Tiny float32 inputs show which eps was added: float32's, although sums may be wider."""
    layer = nn.RMSNorm(4)
    inputs, grads = 1e-4 * torch.randn(1, 4), torch.randn(1, 4)
    layer(inputs).backward(grads)
    weight = f.norm_gradients(layer, inputs, grads)[0]
    # float32 rounding of a handful of operations.
    torch.testing.assert_close(weight, layer.weight.grad, rtol=1e-5, atol=1e-6)
