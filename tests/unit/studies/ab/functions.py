"""Functions of a seed, and a maker of tasks, as a user's file has them."""

import random

from tests.unit.studies import tiny_task


def a(seed):
    return random.Random(seed).random()


def b(seed):
    return a(seed) - 0.5 + 0.01 * random.Random(-seed).random()


def unseeded(seed):
    return random.random()


def faster():
    return tiny_task.make_task(lr=0.03)
