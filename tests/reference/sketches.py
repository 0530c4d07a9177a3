"""Sketches by their definition, one sign at a time, and the variance of what they estimate."""

import math

import numpy as np


def sign(place, salt, j):
    """Sign of a row or a column: a bit of its hash, in whole numbers of any size."""
    mask = 2**32 - 1
    h = place ^ (place >> 32) ^ salt
    for factor, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13), (0x27D4EB2F, 16)):
        h &= mask
        h = (h ^ (h >> shift)) * factor
    h &= mask
    h ^= h >> 15
    return 1 - 2 * ((h >> j) & 1)


def projections(x, first_row=0, first_column=0, count=16):
    """Of a matrix of which this is the part that begins at some row and column."""
    x = np.asarray(x, np.float64)
    out = []
    for j in range(count):
        total = 0.0
        for r, row in enumerate(x):
            for c, value in enumerate(row):
                u = sign(first_row + r, 0x9E3779B9, j)
                v = sign(first_column + c, 0x7F4A7C15, j)
                total += u * value * v
        out.append(total)
    return out


def variance(x):
    """Of the square of one projection, whose mean is the square of the norm."""
    x = np.asarray(x, np.float64)
    square = (x**2).sum()
    gram = ((x.T @ x) ** 2).sum()
    columns, rows = (x**2).sum(0), (x**2).sum(1)
    return (
        2 * square**2 + 6 * gram - 6 * (columns**2).sum() - 6 * (rows**2).sum() + 4 * (x**4).sum()
    )


def enumerated(x):
    """Mean and variance of the square of a projection over all signs of its rows and columns."""
    x = np.asarray(x, np.float64)
    m, n = x.shape
    u = np.array([[1 - 2 * (k >> i & 1) for i in range(m)] for k in range(2**m)])
    v = np.array([[1 - 2 * (k >> i & 1) for i in range(n)] for k in range(2**n)])
    z = (u @ x @ v.T) ** 2
    return z.mean(), z.var()


def deviation(x, count=16):
    """Standard deviation of the estimated square of the norm, as a share of it."""
    square = (np.asarray(x, np.float64) ** 2).sum()
    return math.sqrt(variance(x) / count) / square
