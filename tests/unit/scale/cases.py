"""Small models of every shape that a gradient can flow through, and modules to choose in each."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.lin(x))


class Chain(nn.Module):
    """Registered in the order 0 1 2, or the other way round."""

    def __init__(self, backwards=False, identity=False):
        super().__init__()
        names = ["a", "b", "c"]
        for name in reversed(names) if backwards else names:
            setattr(self, name, Block())
        if identity:
            self.identity = nn.Identity()
        self.last = identity

    def forward(self, x):
        x = self.c(self.b(self.a(x)))
        return self.identity(x) if self.last else x


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = Block(), Block(), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = x + self.a(x)
        x = x + self.b(x)
        return self.out(x)


class Reused(nn.Module):
    """One block three times in a row, and once more beside itself."""

    def __init__(self):
        super().__init__()
        self.first, self.again = nn.Linear(WIDTH, WIDTH), Block()

    def forward(self, x):
        x = self.again(self.again(self.again(self.first(x))))
        return x * self.again(x)


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.outer = nn.Sequential(Block(), Block(), nn.Linear(WIDTH, WIDTH))
        self.after = Block()

    def forward(self, x):
        return self.after(self.outer(x)) + self.outer(x)


class Attention(nn.Module):
    """Keywords, several inputs of which two are one tensor, and a dictionary as output."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, query, *, memory, options=None):
        weights = torch.softmax(self.q(query) @ self.k(memory["keys"]).mT, -1)
        found = weights @ self.v(memory["values"])
        return {"found": found, "nest": [weights, (query, None)], "n": 3}


class KeywordModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        h = self.norm(x)
        out = self.attention(query=h, memory={"keys": h, "values": x}, options={"mode": "soft"})
        return x + out["found"] * out["nest"][0].sum() + out["nest"][1][0]


class InPlace(nn.Module):
    """In place on a scaled output, first thing in a scaled module, and between two of them."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.relu = nn.Linear(WIDTH, WIDTH), Block(), nn.ReLU(inplace=True)
        self.c = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        h = self.a(x)
        h.mul_(2)
        h = self.relu(h) + 1
        h = self.c(h)
        h += 1
        return self.b(h)


class Clamp(nn.Module):
    def forward(self, x):
        x.mul_(3).add_(1)


class CallerRelies(nn.Module):
    """The caller uses an argument that a scaled module has changed in place."""

    def __init__(self):
        super().__init__()
        self.a, self.change, self.b = nn.Linear(WIDTH, WIDTH), Clamp(), Block()

    def forward(self, x):
        h = self.a(x)
        self.change(h)
        return self.b(h) + h


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        state = torch.zeros_like(x)
        total = 0.0
        for _ in range(4):
            state = self.cell(x, state)
            total = total + self.out(state)
        return total + state


class PassThrough(nn.Module):
    """A scaled module that returns its input beside what it computes from it."""

    def __init__(self):
        super().__init__()
        self.inner = Returns()
        self.out = Block()

    def forward(self, x):
        x = x * 2
        same, value = self.inner(x)
        return self.out(same) * value + x


class Returns(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x, self.lin(x) * self.gain


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.a, self.b, self.c = Block(), Block(), Block()
        self.reentrant = reentrant

    def forward(self, x):
        x = self.a(x)
        x = checkpoint(self.b, x, use_reentrant=self.reentrant)
        return self.c(x) + x


class TiedWhole(nn.Module):
    """Tied weights with everything that uses them in one chosen module."""

    def __init__(self):
        super().__init__()
        self.inner = Tied()
        self.out = Block()

    def forward(self, x):
        return self.out(self.inner(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(torch.sin(self.up(x)))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(5, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        tokens = (x.abs() * 100).long() % 5
        return self.head(self.encoder(self.embed(tokens)))


# Name: how it is made, and what is chosen.
CASES = {
    "sequential, identity at the end": (lambda: Chain(identity=True), {"a": 4.0, "b": 8.0, "c": 2}),
    "sequential": (Chain, {"a": 4.0, "b": 8.0, "c": 2.0}),
    "other order": (lambda: Chain(backwards=True), {"a": 4.0, "b": 8.0, "c": 2.0}),
    "residual": (Residual, {"a": 4.0, "b": 0.25}),
    "reused": (Reused, {"again": 16.0}),
    "container": (Nested, {"outer": 16.0}),
    "container and leaf": (Nested, {"outer": 16.0, "outer.1.lin": 4.0, "after": 2.0}),
    "keywords, dictionary": (KeywordModel, {"attention": 8.0, "attention.q": 4.0, "norm": 2.0}),
    "in place": (InPlace, {"a": 4.0, "b": 8.0, "c": 16.0, "relu": 2.0}),
    "in place outside": (InPlace, {"a": 4.0, "b": 8.0, "c.1": 16.0}),
    "caller relies on it": (CallerRelies, {"change": 4.0, "b": 8.0}),
    "recurrent": (Recurrent, {"cell": 8.0, "out": 2.0}),
    "passed through": (PassThrough, {"inner": 8.0, "inner.lin": 4.0}),
    "checkpoint": (lambda: Checkpointed(False), {"a": 4.0, "b": 8.0, "b.lin": 2.0}),
    "reentrant checkpoint": (lambda: Checkpointed(True), {"a": 4.0, "b": 8.0, "b.lin": 2.0}),
    "tied inside": (TiedWhole, {"inner": 8.0, "out": 2.0}),
    "transformer": (Transformer, {"embed": 2.0, "encoder.layers.*": 8.0, "**.linear1": 4.0}),
}

# A chosen module changes its argument: compiled code could not hand that back.
REFUSED_COMPILED = {"in place", "caller relies on it"}
# A boundary adds up the gradients of a tensor that is used several times in another order.
REORDERED = {"keywords, dictionary"}


def model_of(case, dtype=torch.float32):
    torch.manual_seed(0)
    return CASES[case][0]().to(dtype)


def data_of(case, dtype=torch.float32):
    draw = torch.Generator().manual_seed(1)
    return torch.randn(5, WIDTH, generator=draw).to(dtype)


def loss_of(model, x):
    out = model(x)
    # Weights, so that no gradient is zero because of a symmetry.
    return (out * (1 + torch.arange(out.shape[-1], device=out.device))).square().sum()
