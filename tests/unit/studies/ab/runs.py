"""Whole studies from Python, and what their runs gave."""

import steadygrad
from steadygrad.studies.folder import read_run
from steadygrad.studies.schema import Training


def study(folder, *arms, **settings):
    """A study of functions, tasks or commands."""
    return steadygrad.ab(*arms, out=folder, progress=False, device="cpu", threads=1, **settings)


def values(found):
    """The metrics of each arm, pair by pair."""
    runs = read_run(found.folder).results.select(Training)
    return [[run.loss for run in runs if run.arm == arm] for arm in range(1 + runs[-1].arm)]
