"""A small optimizer written with `BatchedOptimizer`."""

import torch

from steadygrad.optim.batched import BatchedOptimizer


class Momentum(BatchedOptimizer):
    """SGD with momentum; torch's rule."""

    def __init__(
        self, params, lr=0.1, momentum=0.9, none_grads="zero", state_dtype=None, at_once=True
    ):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.none_grads, self.state_dtype = none_grads, state_dtype
        if at_once:
            self.allocate_state()

    def init_state(self, batch):
        return {"velocity": torch.zeros_like(batch.param, dtype=self.state_dtype)}

    def step(self, closure=None):
        loss = None if closure is None else closure()
        for group in self.param_groups:
            with self.batched_params(group, none_grads=self.none_grads) as batches:
                for batch in batches:
                    velocity = batch.state["velocity"]
                    velocity.mul_(group["momentum"]).add_(batch.grad)
                    batch.param.add_(velocity, alpha=-group["lr"])
        return loss
