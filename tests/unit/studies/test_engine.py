"""What the training loop refuses before it trains."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.studies.engine import Engine
from steadygrad.studies.ranks import Ranks
from steadygrad.studies.stop import Stop
from steadygrad.tasks import load_task
from tests.unit.studies.helpers import tiny


def engine(task):
    ranks = Ranks.join(Stop(), torch.device("cpu"))
    return Engine(task, seed=0, dtype="float32", ranks=ranks)


def test_a_lazy_model_is_refused_with_the_remedy():
    task = load_task(tiny())
    lazy = replace(task, make_model=lambda: nn.Sequential(nn.LazyLinear(1)))
    with pytest.raises(InputError, match=r"lazy ones. Remedy: run one batch"):
        engine(lazy)
    assert engine(task).model is not None
