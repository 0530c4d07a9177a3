"""Learning-rate schedules as their papers and programs state them, in exact fractions or roots."""

from fractions import Fraction
from itertools import pairwise
from math import sqrt


def icefall_eden(batch, epoch, lr_batches, lr_epochs, warmup_batches=500, warmup_start=0.5):
    """Fourth roots by square roots, warm-up by interpolation between two points."""
    slow_batches = sqrt(sqrt((batch * batch + lr_batches * lr_batches) / (lr_batches**2)))
    slow_epochs = sqrt(sqrt((epoch * epoch + lr_epochs * lr_epochs) / (lr_epochs**2)))
    if warmup_batches > batch:
        done = batch / warmup_batches
        warm = (1 - done) * warmup_start + done
    else:
        warm = 1.0
    return warm / (slow_batches * slow_epochs)


def lans(step, total, warmup_steps, hold_steps):
    """The straight lines through (0, 0), (W, 1), (W + H, 1), (T, 0), in fractions."""
    corners = [(0, 0), (warmup_steps, 1), (warmup_steps + hold_steps, 1), (total, 0)]
    for (x0, y0), (x1, y1) in pairwise(corners):
        if x0 <= step < x1:
            return float(y0 + Fraction(step - x0, x1 - x0) * (y1 - y0))
    return 0.0
