"""Small optimizers written with `BatchedOptimizer`."""

import torch

from steadygrad.optim.batched import BatchedOptimizer


class Momentum(BatchedOptimizer):
    """SGD with momentum; torch's rule."""

    def __init__(self, params, lr=0.1, momentum=0.9, none_grads="zero", state_dtype=None):
        super().__init__(params, {"lr": lr, "momentum": momentum})
        self.none_grads, self.state_dtype = none_grads, state_dtype
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


class Adam(BatchedOptimizer):
    """Adam with its own count of steps for each parameter, and state assigned, not mutated."""

    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    def init_state(self, batch):
        zeros = torch.zeros_like(batch.param)
        return {"step": torch.zeros(len(batch)), "mean": zeros, "square": zeros}

    def step(self):
        for group in self.param_groups:
            with self.batched_params(group, none_grads="skip") as batches:
                for batch in batches:
                    self._update(group, batch)

    def _update(self, group, batch):
        beta1, beta2 = group["betas"]
        state = batch.state
        state["step"] = state["step"] + 1
        state["mean"] = state["mean"].lerp(batch.grad, 1 - beta1)
        state["square"] = (state["square"] * beta2).addcmul(batch.grad, batch.grad, value=1 - beta2)

        def column(values):
            shape = (-1,) + (1,) * (batch.param.ndim - 1)
            return torch.tensor(values, dtype=torch.float64).reshape(shape).to(batch.param)

        steps = state["step"].tolist()
        size = column([-group["lr"] / (1 - beta1**t) for t in steps])
        root = column([(1 - beta2**t) ** 0.5 for t in steps])
        denominator = state["square"].sqrt() / root + group["eps"]
        batch.param.add_(size * state["mean"] / denominator)
