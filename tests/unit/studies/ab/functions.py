"""Functions of a seed, and a maker of tasks, as a user's file has them."""

import random

from tests.unit.studies import tiny_task


def a(seed):
    return random.Random(seed).random()


def moved(shift, noise=0.01):
    """A change of A's metric that is nearly the same for each seed."""
    return lambda seed: a(seed) + shift + noise * random.Random(-seed).random()


b = moved(-0.5)


def unseeded(seed):
    return random.random()


def faster():
    return tiny_task.make_task(lr=0.03)
