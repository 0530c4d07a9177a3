"""Sums that neither round nor overflow in 16 bits, and guards decided on the device."""

import pytest
import torch

from steadygrad import numerics
from steadygrad.numerics import exact, inner_products, square_sums, wide
from steadygrad.optim.passes import Bucket, decays_of, joined, moved_by

NARROW = [torch.float16, torch.bfloat16]


def draw(*shape, dtype=torch.float64):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).to(
        dtype
    )


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(torch.float64, torch.float64), *[(d, torch.float32) for d in [*NARROW, torch.float32]]],
)
def test_sums_are_float32_at_least(dtype, expected):
    assert wide(dtype) == expected
    assert square_sums([draw(3, dtype=dtype)]).dtype == expected


def test_square_sums_are_the_sums_of_squares():
    tensors = [draw(4, 3), draw(5), draw(), draw(0, 2), draw(6, 2).t()]
    expected = torch.stack([t.square().sum() for t in tensors])
    torch.testing.assert_close(square_sums(tensors), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_sixteen_bits_neither_overflow_nor_round_the_sum(dtype):
    # 4096 squares of 256: their sum is past float16's range, and bfloat16 stops at 256 ones.
    assert square_sums([torch.full((4096,), 256.0, dtype=dtype)]).tolist() == [4096 * 256.0**2]
    ones = torch.ones(4099, dtype=dtype)
    assert square_sums([ones]).item() == pytest.approx(4099, rel=1e-6)
    assert inner_products([ones], [ones], torch.float32).tolist() == [4099.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, *NARROW], ids=str)
def test_one_bad_element_shows_in_its_own_sum_only(bad, dtype):
    tensors = [draw(4, 3, dtype=dtype), draw(5, dtype=dtype)]
    tensors[0][2, 1] = bad
    assert torch.isfinite(square_sums(tensors)).tolist() == [False, True]


def test_inner_products_in_every_layout():
    a, b = draw(6, 4), draw(24).view(4, 6).t()
    pairs = [(a, b), (b, b.contiguous()), (a[:, ::2], b[:, ::2]), (draw(), draw()), (draw(0),) * 2]
    found = inner_products(*zip(*pairs, strict=True), torch.float64)
    expected = torch.stack([(x * y).sum() for x, y in pairs])
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=1e-15)
    mixed = inner_products([a], [b.half()], torch.float64)
    assert mixed.dtype == torch.float64
    torch.testing.assert_close(mixed[0], (a * b.half().double()).sum(), rtol=1e-13, atol=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_sanitized_copies(dtype):
    given = [draw(3, 2, dtype=dtype), torch.zeros((), dtype=dtype).expand(2, 2)]
    given[0][1, 1] = torch.nan
    before = [g.clone() for g in given]
    bucket = Bucket([0, 1], given, given, ())
    kept = bucket.sanitized([torch.tensor(True)] * 2, torch.float32)
    for copy, g in zip(kept, given, strict=True):
        assert copy.dtype == torch.float32
        torch.testing.assert_close(copy, g.float(), rtol=0, atol=0, equal_nan=True)
        copy.fill_(7.0)
    gone = bucket.sanitized([torch.tensor(False)] * 2, torch.float32)
    assert all(torch.equal(copy, torch.zeros(g.shape)) for copy, g in zip(gone, given, strict=True))
    for g, b in zip(given, before, strict=True):
        torch.testing.assert_close(g, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_gradients_without_their_loss_scale(dtype):
    given = [draw(3, 2, dtype=dtype), draw(4, dtype=dtype)]
    before = [g.clone() for g in given]
    for scale in (None, torch.tensor(2.0**-20, dtype=torch.float64)):
        bucket = Bucket([0, 1], given, given, (), scale)
        expected = [g.float() * (1.0 if scale is None else 2.0**-20) for g in before]
        both = (
            bucket.unscaled(),
            bucket.sanitized([torch.tensor(True)] * 2, torch.float32),
        )
        for found in both:
            assert all(torch.equal(a.float(), b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(g, b) for g, b in zip(given, before, strict=True))


def bucket_of(places, dtype):
    """Parameters at some places of a batch, all of them alike."""
    one = [torch.ones(2, dtype=dtype) for _ in places]
    return Bucket(places, one, one, (one, one))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_averages_decay_where_a_step_is_taken(dtype):
    bucket, taken = bucket_of([2, 0], dtype), torch.tensor([True, False, False])
    first, second = decays_of(bucket, (0.9, 0.999), taken)
    # To the last digit of the state's own type.
    assert [x.item() for x in first] == [1.0, torch.tensor(0.9, dtype=dtype).item()]
    assert [x.item() for x in second] == [1.0, torch.tensor(0.999, dtype=dtype).item()]
    assert {x.dtype for x in (*first, *second)} == {dtype}


def test_sums_of_buckets_stand_in_their_places():
    weights = [torch.ones(1)] * 4
    parts = [([3], torch.tensor([[3.0], [30.0]])), ([0, 1], torch.tensor([[1.0, 2], [10, 20]]))]
    assert joined(weights, parts, 2).tolist() == [[1, 2, 0, 3], [10, 20, 0, 30]]
    assert joined(weights, [], 2).tolist() == [[0] * 4] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_rounded_once_where_they_move(dtype):
    weight, step = torch.full((3,), 1.5, dtype=dtype), torch.full((3,), 0.001)
    moved_by([weight], [torch.tensor(0.9999)], [step])
    expected = torch.tensor(1.5) * torch.tensor(0.9999) - 0.001
    assert torch.equal(weight, torch.full((3,), expected.item()).to(dtype))


def test_the_widest_type_of_a_device_is_found_out(monkeypatch):
    monkeypatch.setattr(numerics, "_WIDEST", {})
    assert exact(torch.device("cpu")) is torch.float64
    monkeypatch.setattr(numerics, "_WIDEST", {})

    def narrow(*shape, dtype, device):
        raise TypeError("this device has no float64")

    monkeypatch.setattr(torch, "zeros", narrow)
    assert exact(torch.device("cpu")) is torch.float32


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["plain", "transposed", "strided"])
def test_sums_of_many_elements_lose_no_digits(layout):
    """A CPU adds them up one after the other: 2^22 of them in one go are off by 2e-4."""
    draws = torch.Generator().manual_seed(3)
    shape = {"strided": (2**11, 2**12)}.get(layout, (2**11, 2**11))
    x, y = (torch.randn(shape, generator=draws) + 0.1 for _ in range(2))
    if layout == "transposed":
        x, y = x.t(), y.t()
    elif layout == "strided":
        x, y = x[:, ::2], y[:, ::2]
    exact = x.double().square().sum(), (x.double() * y.double()).sum()
    # Each piece is good to 3e-7, and their errors have either sign.
    assert square_sums([x, x[:2]])[0].item() == pytest.approx(exact[0].item(), rel=5e-7)
    # The zeros of a gradient that is None have no memory of their own, and get none.
    assert square_sums([torch.zeros(()).expand(2**20, 2**10)]).tolist() == [0]
    found = inner_products([x], [y], torch.float32).item()
    assert found == pytest.approx(exact[1].item(), rel=5e-6)  # cancels to a hundredth of its terms
