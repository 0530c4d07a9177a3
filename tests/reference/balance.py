"""The balancer's rule in float64, number by number, on a joined batch's gradients."""

import math

import numpy as np


class ReferenceBalancer:
    """Balances lists of per-item gradients, number by number.

    A step is a list of micro-batches; a micro-batch holds one entry a process; an entry maps a
    loss's name to its gradient as a list of items, each a list of numbers. A process without a
    loss has no gradient from it, but its items are there all the same.
    """

    def __init__(
        self,
        weights,
        *,
        total_norm=1.0,
        ema_decay=0.999,
        per_item=True,
        eps=1e-12,
        batch_independent=False,
        balance=True,
    ):
        self.weights, self.total_norm, self.decay, self.eps = weights, total_norm, ema_decay, eps
        self.per_item, self.batch_independent, self.balance = per_item, batch_independent, balance
        self.total = dict.fromkeys(weights, 0.0)
        self.mass = dict.fromkeys(weights, 0.0)

    def joined(self, micro, name, items):
        """The gradient of the mean of the processes' losses, items of all of them in a row."""
        rows = []
        for entry, count in zip(micro, items, strict=True):
            gradient = entry.get(name) or [[0.0]] * count
            rows += [[x / len(micro) for x in item] for item in gradient]
        return rows

    def norm(self, micros, name, items):
        """The norm over the micro-batches in which the loss is there."""
        per_micro, sizes = [], []
        for micro in micros:
            if not any(name in entry for entry in micro):
                continue
            rows = self.joined(micro, name, items)
            norms = [math.sqrt(sum(x * x for x in row)) for row in rows]
            per_micro.append(sum(norms) if self.per_item else sum(n * n for n in norms))
            sizes.append(len(rows))
        if not per_micro:
            return None
        amount, n = sum(per_micro) / len(per_micro), sum(sizes) / len(sizes)
        if self.per_item:
            return amount if self.batch_independent else amount / n
        return math.sqrt(amount) * (math.sqrt(n) if self.batch_independent else 1.0)

    def scales(self, micros, items):
        """Scales for the last of a step's micro-batches so far, without moving the averages."""
        found = {}
        for name in self.weights:
            norm = self.norm(micros, name, items)
            here = self.norm(micros[-1:], name, items)
            if norm and here and math.isfinite(norm):
                mass = self.decay * self.mass[name] + 1
                found[name] = (self.decay * self.total[name] + norm) / mass
        whole = sum(self.weights[name] for name in found)
        if not self.balance:
            return {name: self.weights[name] for name in found}
        return {
            name: self.weights[name] / whole * self.total_norm / (self.eps + average)
            for name, average in found.items()
        }

    def end_step(self, micros, items):
        """Moves the averages by a whole step."""
        for name in self.weights:
            norm = self.norm(micros, name, items)
            if norm:
                self.total[name] = self.decay * self.total[name] + norm
                self.mass[name] = self.decay * self.mass[name] + 1

    def step(self, micros, items):
        """For each micro-batch and process the balanced gradient, items in rows."""
        results = []
        for end in range(1, len(micros) + 1):
            scales = self.scales(micros[:end], items)
            parts = [
                [scales.get(name, 0.0) * np.array(rows) for name, rows in entry.items()]
                for entry in micros[end - 1]
            ]
            results.append([sum(own).tolist() if own else None for own in parts])
        self.end_step(micros, items)
        return results
