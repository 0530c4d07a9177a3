"""An output that one tool takes, the other takes too: the side of the balancer."""

import pytest
import torch

from steadygrad import LossBalancer
from tests.unit.test_nests import HIDDEN, KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_fork_takes_every_kind(kind):
    make, value_of = KINDS[kind]
    y = torch.randn(4, 3, requires_grad=True)
    ys = LossBalancer({"a": 1.0, "b": 1.0}).fork(make(y * 1))
    assert type(ys["a"]) is type(make(y))
    (value_of(ys["a"]).sum() + value_of(ys["b"]).square().sum()).backward()
    assert y.grad is not None


@pytest.mark.parametrize("kind", HIDDEN)
def test_fork_refuses_what_cannot_be_taken_apart(kind):
    make, remedy = HIDDEN[kind]
    y = torch.randn(4, 3, requires_grad=True)
    with pytest.raises(ValueError, match=remedy):
        LossBalancer({"a": 1.0, "b": 1.0}).fork(make(y * 1))
