"""Eight-bit codes, ours and published ones, random bits, and Adam's moments in such codes.

A code takes numbers and random bits, and returns what is read back and each block's smallest code.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

F, U = np.float32, np.uint32
BETA1, EPS = 0.9, 1e-8
SALT, STEP, INDEX = 12345, 0x85EBCA77, 0x9E3779B1


def bits(x):
    return np.asarray(x, F).view(U)


def number(b):
    return np.asarray(b, U).view(F)


@dataclass(frozen=True)
class Minifloat:
    """Bits of exponent and mantissa on a block's power of two, with gradual underflow."""

    exponent: int
    mantissa: int
    block: int = 64
    spare: bool = False  # The largest binade stays unused, as in the first prototype.
    nearest: bool = False

    def __call__(self, x, r):
        a, shift = np.abs(x).reshape(-1, self.block), U(23 - self.mantissa)
        first, unit = U(128 - 2**self.exponent << 23), U(1 << shift)
        offset = number(first)
        # A number that rounds up, or gains the offset, must not pass the last code.
        room = U(2**23) if self.spare else unit + U(max(1, int(offset * 2.0**23)))
        e = np.clip((bits(a.max(1, keepdims=True)) + room) >> U(23), 1, 253).astype(U)
        scale, inverse = number(e << U(23)), number((U(254) - e) << U(23))
        r = unit >> U(1) if self.nearest else (r & (unit - U(1))).reshape(a.shape)
        y = number((bits(a * inverse + offset) + r) & ~(unit - U(1))) - offset
        least = (number(first + unit) - offset) * scale
        return np.copysign((y * scale).ravel(), x), np.broadcast_to(least, a.shape).ravel()


@dataclass(frozen=True)
class Table:
    """Values in [0, 1] times a block's largest number; nearest, or at random between neighbours."""

    values: tuple[float, ...]
    block: int = 256
    nearest: bool = True
    edges: tuple[float, ...] = ()  # Between codes; none: halfway between values.
    mantissa = 4  # As many random bits as a minifloat's.

    @cached_property
    def arrays(self):
        """Values, edges between codes, and how many edges lie below each coarser number."""
        v = np.array(self.values, F)
        halfway = np.array(self.edges, F) if self.edges else (v[1:] + v[:-1]) / 2
        edges = halfway if self.nearest else v[1:-1]
        coarse = number(np.arange((0x3F800000 >> 14) + 1, dtype=U) << U(14))
        return v, np.append(edges, F(np.inf)), np.searchsorted(edges, coarse)

    def __call__(self, x, r):
        (values, edges, below), a = self.arrays, np.abs(x).reshape(-1, self.block)
        scale = a.max(1, keepdims=True)
        y = (a / np.where(scale > 0, scale, F(1))).ravel()
        k = below[bits(y) >> U(14)]
        k = k + (y > edges[k])
        if not self.nearest:
            u = (r & U(0x7FFFF)).astype(F) * F(2.0**-19)
            k = k + (values[k] + u * (values[k + 1] - values[k]) < y)
        least = np.broadcast_to(values[values > 0].min() * scale, a.shape)
        return np.copysign((values[k].reshape(a.shape) * scale).ravel(), x), least.ravel()


def exact(x, r):
    return x, F(0)


def tree(signed, block=256, nearest=True):
    """Dynamic trees (Dettmers et al., 2022, arXiv 2110.02861): decades, each twice as fine."""
    values = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i if signed else i + 1) + 1)
        values += list(10.0 ** (i - 6) * (edges[:-1] + edges[1:]) / 2)
    return Table(tuple(sorted(values)), block, nearest)


def fp8():
    """float8_e4m3fn with a block's largest number at 448, for both moments (torchao's AdamWFp8)."""
    codes = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 448
    return Table(tuple(codes.tolist()))


def companded(inverse, codes):
    """FlashOptim's (2026, arXiv 2602.23349): equal steps of a function of the number."""
    values = [float(inverse(k / codes)) for k in range(codes + 1)]
    edges = [float(inverse((k + 0.5) / codes)) for k in range(codes)]
    return Table(tuple(values), 32, edges=tuple(edges))


V, M, VW, MW = Minifloat(4, 4), Minifloat(3, 4), Minifloat(5, 3), Minifloat(4, 3)
ROOT, SOFTSIGN = companded(lambda z: z * z, 255), companded(lambda z: z / (2 - z), 127)
# Linear without a zero, as for four bits by Li et al. (2023, arXiv 2309.01507).
LINEAR = Table(tuple((k + 1) / 256 for k in range(256)), 128)
NARROW, WIDE = "E4M4, s+E3M4", "E5M3, s+E4M3"
# The code of the second moment, and of the first; blocks of 64 where nothing else is said.
CODES = {
    NARROW: (V, M),
    f"{NARROW}, 32": (Minifloat(4, 4, 32), Minifloat(3, 4, 32)),
    f"{NARROW}, 128": (Minifloat(4, 4, 128), Minifloat(3, 4, 128)),
    f"{NARROW}, top unused": (Minifloat(4, 4, spare=True), Minifloat(3, 4, spare=True)),
    f"{NARROW}, nearest": (Minifloat(4, 4, nearest=True), Minifloat(3, 4, nearest=True)),
    "E4M4, s+E4M3": (V, MW),
    "E4M4, s+E2M5": (V, Minifloat(2, 5)),
    "E5M3, s+E3M4": (VW, M),
    "E3M5, s+E3M4": (Minifloat(3, 5), M),
    WIDE: (VW, MW),
    f"{WIDE}, 32": (Minifloat(5, 3, 32), Minifloat(4, 3, 32)),
    f"{WIDE}, 128": (Minifloat(5, 3, 128), Minifloat(4, 3, 128)),
    "root at random, s+E3M4": (Table(ROOT.values, 64, nearest=False), M),
    "trees at random": (tree(False, 64, nearest=False), tree(True, 64, nearest=False)),
    "published: trees, 256": (tree(False), tree(True)),
    "published: float8, 256": (fp8(), fp8()),
    "published: root, softsign, 32": (ROOT, SOFTSIGN),
    "published: linear, tree, 128": (LINEAR, tree(True, 128)),
}
# The smallest code times this is the least denominator; whether |m| / sqrt(v) is bounded.
GUARDS = {"none": (0, 0), "bound": (0, 1), "floor": (1, 0), "both": (1, 1), "16 floors": (16, 1)}


def mixed(h):
    """The last steps of MurmurHash3, of one number or of many."""
    for s, k in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        h = (h ^ h >> s) * k & 0xFFFFFFFF
    return h ^ h >> 16


def weyl(step, index):
    return U((SALT + step * STEP) % 2**32) + index * U(INDEX)


def started(step, index):
    return U(mixed((SALT + step * STEP) % 2**32)) + index * U(INDEX)


def sloped(step, index):
    """Start and slope anew at each step: independent in time, and from element to element."""
    start = mixed((SALT + step * STEP) % 2**32)
    return U(start) + index * U(mixed((start + INDEX) % 2**32) | 1)


def hashed(step, index):
    return mixed(weyl(step, index).astype(np.uint64)).astype(U)


def drawn(step, index):
    return np.random.default_rng(step).integers(0, 2**32, len(index), dtype=U)


DRAWS = {"Weyl": weyl, "start": started, "start, slope": sloped, "hash": hashed, "numpy": drawn}


class Moments:
    """Both moments of some elements, coded after each step."""

    def __init__(self, codes, elements, beta2, draw=sloped):
        (self.code_v, self.code_m), self.beta2, self.draw, self.t = codes, beta2, draw, 0
        self.index = np.arange(elements, dtype=U)
        self.m, self.v, self.least = (np.zeros(elements, F) for _ in range(3))
        # By Cauchy-Schwarz the largest |m| / sqrt(v) of any gradients, where BETA1^2 < beta2.
        self.most = (1 - BETA1) / ((1 - beta2) * (1 - BETA1**2 / beta2)) ** 0.5

    def add(self, g):
        """Moments with this gradient, not yet coded, and the smallest code they came from."""
        self.t += 1
        m = self.m * F(BETA1) + F(1 - BETA1) * g
        v = self.v * F(self.beta2) + F(1 - self.beta2) * g * g
        r, least = self.draw(self.t, self.index), self.least
        # The second moment takes the highest bits, the first one the lowest.
        high = r >> U(9 + getattr(self.code_v, "mantissa", 0))
        self.m, (self.v, self.least) = self.code_m(m, r)[0], self.code_v(v, high)
        return m, v, least

    def step(self, m, v, least, guard):
        """Adam's step over its rate."""
        floor, bound = GUARDS[guard]
        v = np.maximum(v, F(floor) * least)
        v = np.maximum(v, m * m * F(self.most**-2)) if bound else v
        root = np.sqrt(v / F(1 - self.beta2**self.t))
        return m / F(1 - BETA1**self.t) / (root + F(EPS))
