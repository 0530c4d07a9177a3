"""A module that is its parts and one function."""

from torch import nn


class Net(nn.Module):
    """Modules by name, and a function of this net and of what it is called with."""

    def __init__(self, function, **modules):
        super().__init__()
        self.function = function
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, *args, **kwargs):
        return self.function(self, *args, **kwargs)
