"""The slow, literal watch: keeps a copy of every tensor of a step, and walks over them in order.

Nothing is left out, nothing is added up, and every look waits: ``first()`` is the first module
output, or gradient of one, that is not finite as the step is executed. What a module without
submodules is given counts too, where no other module gave it.
"""

import torch
from torch import Tensor


class Trace:
    def __init__(self, model):
        self.tensors = []  # (what, name, copy) in the order of execution
        self.given = []  # kept, so that none takes another's place
        for name, module in model.named_modules():
            module.register_forward_hook(lambda _, __, y, name=name: self.see(name, y))
            if not [*module.children()]:
                enter = lambda _, args, name=name: self.enter(name, args)
                module.register_forward_pre_hook(enter)

    def enter(self, name, args):
        for x in args:
            if isinstance(x, Tensor) and not any(x is other for other in self.given):
                self.see(name, x, "input")

    def see(self, name, tensor, what="output"):
        self.given.append(tensor)
        self.tensors.append((what, name, tensor.detach().clone()))
        if tensor.requires_grad:
            words = f"gradient at the {what}"
            tensor.register_hook(lambda g: self.tensors.append((words, name, g.clone())))

    def first(self):
        """The first fault and its place; None if all is finite."""
        for what, name, tensor in self.tensors:
            if not torch.isfinite(tensor).all():
                return what, name
        return None
