"""The slow, literal watch: keeps a copy of every tensor of a step, and walks over them in order.

Nothing is left out, nothing is added up, and every look waits: ``first(step)`` is the first module
output, or gradient of one, that is not finite as the step is executed.
"""

import torch


class Trace:
    def __init__(self, model):
        self.tensors = []  # (what, name, copy) in the order of execution
        self.handles = [
            module.register_forward_hook(lambda _, __, out, name=name: self.see(name, out))
            for name, module in model.named_modules()
        ]

    def see(self, name, output):
        self.tensors.append(("output", name, output.detach().clone()))
        if output.requires_grad:
            output.register_hook(
                lambda gradient: self.tensors.append(("gradient", name, gradient.clone()))
            )

    def first(self):
        """What and where; None if all is finite."""
        for what, name, tensor in self.tensors:
            if not torch.isfinite(tensor).all():
                return what, name
        return None

    def remove(self):
        for handle in self.handles:
            handle.remove()
