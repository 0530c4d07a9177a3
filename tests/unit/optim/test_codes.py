"""What eight-bit moments promise: no bias, no stall, bounded steps, and the same bits anywhere."""

import itertools

import pytest
import torch

from steadygrad.optim import LAMB, LANS, ScaledAdam, codes
from steadygrad.optim.codes import BLOCK, DIGITS, FIRST, SECOND, decode, encode, seeds_at
from tests.contracts.problems import assert_same, give_gradients, run, small_codes, threads

both = pytest.mark.parametrize("code", [FIRST, SECOND], ids=["first", "second"])
OPTIMIZERS = {"lans": LANS, "lamb": LAMB, "scaled_adam": ScaledAdam}
every_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
MOST = (1 << DIGITS) - 1


def rounded(blocks, code, start=0, slope=0):
    """Numbers with shape ``(rows, BLOCK)`` by way of their codes, and the exponents."""
    found, exponents = encode(blocks, torch.tensor([start, slope]), BLOCK, code)
    return decode(found, exponents, BLOCK, code), exponents


def turns(code, count):
    """Start and slope with which random bits are ``count`` numbers at equal distances, in turns."""
    step = (MOST + 1) // count
    # In the middle of each part, so that a last digit of float32 changes nothing.
    return step // 2 << code.shift, step << code.shift


def numbers_between(code, start, stop, parts):
    """Numbers at equal distances from each code to the next, for a scale of one."""
    size = torch.arange(start, stop)[:, None] << DIGITS
    bits = size + torch.arange(parts) * ((MOST + 1) // parts) + code.base
    return (bits.to(torch.int32).view(torch.float32).double() - code.offset).float()


@both
@pytest.mark.parametrize("exponent", [60, 127, 200])
def test_a_number_between_any_two_codes_is_their_average(code, exponent):
    scale = 2.0 ** (exponent - 127)
    x = numbers_between(code, 0, code.top, 8).reshape(-1, 1) * scale
    for sign in (1, -1) if code is FIRST else (1,):
        # Half of a block is there for the scale alone.
        given = torch.cat(
            [x.new_full((len(x), BLOCK // 2), 1.87 * scale), sign * x.expand(-1, 128)], 1
        )
        given = given.clamp(max=1.87 * scale)
        found, exponents = rounded(given, code, *turns(code, BLOCK // 2))
        assert (exponents == exponent).all()
        assert found[:, 128:].unique(dim=1).shape[1] > 1
        error = found[:, 128:].double().mean(1) - given[:, 128:].double().mean(1)
        # Of float32's last digit, where the constant is added.
        least = 2.0**-23 * (x[:, 0].double() + code.offset * scale)
        assert (error.abs() <= least).all()


@both
def test_no_largest_number_is_cut(code):
    """Whatever the largest number of a block: a cut one would come back smaller on average."""
    x = numbers_between(code, code.top - 15, code.top + 1, 256).reshape(-1, 1)
    found, exponents = rounded(x.expand(-1, BLOCK).contiguous(), code, *turns(code, BLOCK))
    assert {*exponents.tolist()} == {126, 127, 128}
    torch.testing.assert_close(found.double().mean(1), x[:, 0].double(), rtol=2.0**-14, atol=0)


@both
def test_zeros_and_numbers_at_the_ends_of_float32(code):
    zeros = torch.zeros(2, BLOCK)
    zeros[1, 0] = 3.0
    for seed in (0, MOST, MOST << 12, 0xFFFFFFFF):
        assert not rounded(zeros, code, seed)[0].flatten()[1:256].any()
        assert not rounded(zeros, code, seed)[0][1, 1:].any()
    tiny = torch.full((1, BLOCK), 2.0**-140)
    assert (
        abs(rounded(tiny, code, *turns(code, BLOCK))[0].double().mean().item() - 2.0**-140)
        <= 2.0**-149
    )
    top = torch.finfo(torch.float32).max
    for large in (top, torch.inf):
        found = rounded(torch.full((1, BLOCK), large), code)[0]
        assert found.isfinite().all()
        assert found.min() > 0.9 * 2.0**126


@pytest.mark.parametrize("mode", ["fused", "foreach"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.98)], ids=str)
def test_no_codes_make_a_step_longer_than_float32s_longest(mode, betas):
    beta1, beta2 = betas
    most = (1 - beta1) / ((1 - beta2) * (1 - beta1**2 / beta2)) ** 0.5
    p, draw = torch.zeros(90, BLOCK, requires_grad=True), torch.Generator().manual_seed(0)
    options = {"weight_decay": 0.0, "adapt": False, "lr": 1.0, "eps": 1e-30, mode: True}
    optimizer = LAMB([p], betas=betas, state_dtype="8bit", **options)
    # Random codes and scales, as of a parameter that has taken many steps.
    state = optimizer.state[p]
    for name, own in state.items():
        if own.dtype is torch.uint8:
            low, high = (100, 140) if name.endswith(codes.EXPONENTS) else (0, 256)
            own.copy_(torch.randint(low, high, own.shape, generator=draw, dtype=torch.uint8))
    # Some blocks have second moments of zero, and first ones that are not.
    state["exp_avg_sq"][::3] = 0
    state["step"].fill_(1e6)
    p.grad = torch.randn(p.shape, generator=draw) * 10.0 ** torch.randint(-6, 6, p.shape)
    p.grad[:, ::2] = 0
    optimizer.step()
    assert most * 0.999 < p.abs().max() <= most * (1 + 1e-5)


def test_a_report_changes_no_state():
    p = torch.randn(20, BLOCK, generator=torch.Generator().manual_seed(0)).requires_grad_()
    optimizer, p.grad = LANS([p]), p.detach() + 1
    optimizer.step()
    optimizer.param_groups[0]["state_dtype"] = "8bit"
    optimizer.diagnostics()
    assert optimizer.state[p]["exp_avg_sq"].dtype is torch.float32
    optimizer.step()
    assert optimizer.state[p]["exp_avg_sq"].dtype is torch.uint8


# Rows of a part of a block, of one, of some, and of more than one.
SHAPES = [(200, 32), (130, 33), (20, 255), (300, 256), (257, 257), (30, 5000), (2, 50, 64)]


def trained(make, **options):
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(shape, generator=draw).requires_grad_() for shape in SHAPES]
    optimizer = make(params, state_dtype="8bit", **options)
    run(optimizer, params, range(5), none=False)
    states = [optimizer.state[p] for p in params]
    found = [(n, t) for state in states for n, t in state.items() if t.dtype is torch.uint8]
    assert len(found) == 4 * len(SHAPES)
    return [t for _, t in found], params


@every_optimizer
def test_the_same_bits_by_any_number_of_threads_and_both_paths(make):
    expected, weights = trained(make, foreach=True)
    first = None
    for count in (1, 2, 3, 4):
        with threads(count):
            found, params = trained(make, fused=True)
        assert all(map(torch.equal, found, expected))
        first = first or params
        assert all(map(torch.equal, params, first))
    for p, q in zip(first, weights, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


CLIPPED = {
    LANS: {"clip_value": 0.01},
    LAMB: {"max_grad_norm": 1.0},
    ScaledAdam: {"clipping_scale": 1.0, "clipping_update_period": 10},
}


@every_optimizer
def test_the_same_states_by_loops_and_calls_over_200_steps(make):
    """With size steps, clipping and loss scales, beside vectors and a group in float32.

    Sums are in float64, in two orders: once in some ten million their roundings to float32 differ.
    """
    both = []
    for mode in ("fused", "foreach"):
        draw = torch.Generator().manual_seed(0)
        shapes = (40, 300), (50, 20), (30,), (), (9, 200)
        params = [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]
        groups = [{"params": params[:4], "state_dtype": "8bit"}, {"params": params[4:]}]
        with small_codes(), threads(1):
            optimizer = make(groups, **CLIPPED[make], **{mode: True})
            for step in range(200):
                give_gradients(params, step)
                optimizer.grad_scale = torch.tensor(3.0 * 2 ** (step // 20))
                for p in params:
                    if p.grad is not None:
                        p.grad.mul_(optimizer.grad_scale * (1 + step % 7))
                optimizer.found_inf = torch.tensor(float(step % 37 == 5))
                optimizer.step()
        both.append([t for p in params for t in optimizer.state[p].values()])
        both[-1] += params if make is ScaledAdam else []
    assert {torch.uint8, torch.float32} <= {t.dtype for t in both[0]}
    assert optimizer.skipped == 6
    assert_same(*both)


def test_random_bits_are_of_element_step_and_parameter():
    """At one step and the next, of parameters and elements side by side, of both moments."""
    n, first = 4096, torch.zeros(1, dtype=torch.int64)
    rows = []
    for place in range(3):
        starts, slopes = seeds_at(torch.full((n,), place), torch.arange(1.0, n + 1), first)
        assert (slopes % 2 == 1).all()
        for bits in (starts, starts + slopes, starts + 257 * slopes):
            rows += [((bits >> code.shift) & MOST).double() / MOST for code in (FIRST, SECOND)]
    rows = torch.stack([*(x[1:] for x in rows), *(x[:-1] for x in rows)])
    assert (rows.mean(1) - 0.5).abs().max() < 0.02
    assert (rows.corrcoef() - torch.eye(len(rows))).abs().max() < 6 / n**0.5
    # As parameters, too: the same numbers have other codes at another place, and at the next step.
    p, q = (torch.ones(64, 64, requires_grad=True) for _ in range(2))
    optimizer = LANS([p, q], state_dtype="8bit")
    p.grad = q.grad = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    optimizer.step()
    first, second = (optimizer.state[x]["exp_avg"] for x in (p, q))
    assert 0.2 < (first != second).double().mean() < 0.8


@every_optimizer
def test_states_of_float32_become_codes_and_numbers_again(make):
    """As a load into an optimizer of the other kind; what is never coded stays as it is."""
    draw = torch.Generator().manual_seed(0)
    params = [torch.randn(64, 100, generator=draw), torch.randn(100, generator=draw)]
    optimizers = [
        make([p.clone().requires_grad_() for p in params], state_dtype=dtype)
        for dtype in ("float32", "8bit", "float32")
    ]
    run(optimizers[0], optimizers[0].param_groups[0]["params"], range(3), none=False)
    for one, other in itertools.pairwise(optimizers):
        other.load_state_dict(one.state_dict())
    (given, plain), (coded, _), (found, back) = ([*o.state.values()] for o in optimizers)
    names = [name for name in found if name + codes.EXPONENTS in coded]
    for name, code in zip(names, (FIRST, SECOND), strict=True):
        top = given[name].abs().max()
        torch.testing.assert_close(found[name], given[name], rtol=0.125, atol=2.0**-13 * float(top))
        assert abs((found[name] - given[name]).mean()) < 2e-3 * top
        numbers = decode(coded[name], coded[name + codes.EXPONENTS], 100, code)
        assert torch.equal(found[name], numbers)
        assert torch.equal(back[name], plain[name])
    assert {*found} == {*given} == {n for n in coded if not n.endswith(codes.EXPONENTS)}
    assert found["step"] == 3


def test_what_keeps_float32():
    """Small parameters, short rows, numbers and vectors; float64 has more to lose."""
    kept = [(4096,), (127, 32), (256, 31), (), (0, 64)]
    params = [torch.zeros(shape, requires_grad=True) for shape in (*kept, (128, 32), (2, 64, 32))]
    params.append(torch.zeros(128, 32, dtype=torch.float64, requires_grad=True))
    optimizer = LANS(params, state_dtype="8bit")
    coded = [p.shape for p in params if optimizer.state[p]["exp_avg"].dtype is torch.uint8]
    assert coded == [(128, 32), (2, 64, 32)]
    assert optimizer.state[params[6]]["exp_avg_exponents"].shape == (2, 8)
