"""Several losses, each with the share of the gradient that was asked for."""

from steadygrad.balance.loss_balancer import LossBalancer

__all__ = ["LossBalancer"]
