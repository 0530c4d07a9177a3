"""Layer-wise scaling, slowly: what fairscale's class does, and our rules in plain Python."""

import math

import torch


class Original:
    """fairscale's layer-wise scaler as its behaviour is described, for modules called in a row.

    Every named module has a scale, 1 unless one is given. A module's backward hook takes its
    own scale out of the gradient at its input and puts in that of the module before it in the
    order of registration. Its flags of the step before decide whether gradients are divided.
    """

    def __init__(
        self, model, scales, growth_factor=2.0, backoff_factor=0.5, growth_interval=10_000
    ):
        self.modules = {name: module for name, module in model.named_modules() if name}
        self.given = set(scales)
        self.scales = {name: float(scales.get(name, 1.0)) for name in self.modules}
        self.bad, self.counts = dict.fromkeys(self.modules, False), dict.fromkeys(self.modules, 0)
        self.growth, self.backoff, self.interval = growth_factor, backoff_factor, growth_interval
        self.hooks = []

    def scale(self):
        before = 1.0
        for name, module in self.modules.items():
            factor = before / self.scales[name]
            before = self.scales[name]
            self.hooks.append(module.register_full_backward_hook(_multiplier(factor)))

    def unscale(self):
        for name, module in self.modules.items():
            for parameter in module.parameters():
                if parameter.grad is not None and not self.bad[name]:
                    parameter.grad /= self.scales[name]
        while self.hooks:
            self.hooks.pop().remove()

    def step(self, optimizer):
        for name, module in self.modules.items():
            grads = [p.grad for p in module.parameters() if p.grad is not None]
            self.bad[name] = any(not torch.isfinite(grad).all() for grad in grads)
        if not any(self.bad.values()):
            optimizer.step()
        for name in self.modules:
            self._move(name)

    def _move(self, name):
        given = name in self.given
        if self.bad[name]:
            if given:
                self.scales[name] *= self.backoff
                self.counts[name] = 0
            return
        self.counts[name] += 1
        if given and self.counts[name] == self.interval:
            self.scales[name] *= self.growth
            self.counts[name] = 0


def _multiplier(factor):
    return lambda module, inputs, outputs: tuple(g if g is None else g * factor for g in inputs)


def next_scale(scale, count, found, growth, backoff, interval, low, high):
    """One layer's scale and its count of finite steps after a step."""
    if found:
        return min(max(scale * backoff, low), high), 0
    if count + 1 >= interval:
        return min(max(scale * growth, low), high), 0
    return scale, count + 1


def histogram(values):
    """Counts by binary exponent; zeros at -inf, what is not finite at inf."""
    counts = {}
    for value in values:
        if not math.isfinite(value):
            exponent = math.inf
        elif value == 0:
            exponent = -math.inf
        else:
            exponent = math.frexp(value)[1] - 1
        counts[exponent] = counts.get(exponent, 0) + 1
    return counts


def fates(values, scale, dtype):
    """Shares of values that are zero, become zero, lose digits, or overflow under a scale."""
    info = torch.finfo(dtype)
    least = info.tiny * info.eps
    zero = flushed = subnormal = overflow = 0
    for value in values:
        size = abs(value) * scale
        zero += size == 0
        flushed += 0 < size < least / 2
        subnormal += least / 2 <= size < info.tiny
        overflow += not size < 2.0 ** math.ceil(math.log2(info.max))
    return [n / len(values) for n in (zero, flushed, subnormal, overflow)]
