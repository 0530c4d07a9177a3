"""A small transformer and a loop that trains it with a trace, in one process or in several."""

import shutil

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from steadygrad.trace import Trace

VOCABULARY, WIDTH, LENGTH, BATCH = 40, 24, 12, 8


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x, mask=None):
        scores = self.q(x) @ self.k(x).mT / WIDTH**0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        scores = scores.masked_fill(~causal, -torch.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None], -torch.inf)
        return self.out(scores.softmax(-1) @ self.v(x))


class Block(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.drop = nn.Dropout(dropout)
        self.mlp = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        )

    def forward(self, x, mask=None):
        x = x + self.drop(self.attention(self.norm(x), mask))
        return x + self.mlp(x)


class Transformer(nn.Module):
    """Parameters of its own code, tied weights, dropout, and gradients that are rounding alone."""

    def __init__(self, dropout=0.1):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH) / 10)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens, mask=None):
        x = self.embed(tokens) + self.place
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


def make(dropout=0.0, seed=0):
    torch.manual_seed(seed)
    model = Transformer(dropout)
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def batch(step):
    """Tokens and what follows each of them, with shape ``(BATCH, LENGTH)``."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens, targets):
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


class Fault:
    """Places in the loop where something can be done wrongly; here nothing is."""

    def on_start(self, model, optimizer):
        pass

    def on_step(self, step, model, optimizer):
        pass

    def on_batch(self, step, tokens, targets):
        return tokens, targets

    def on_loss(self, step, loss):
        return loss

    def on_gradients(self, step, model, optimizer):
        pass

    def on_end(self, step, model, optimizer):
        pass


def train(
    folder, model, optimizer, fault=None, *, wrap=lambda model: model, steps=4, start=0, micros=1,
    rank=0, world=1, clip=1.0, **options,
):  # fmt: skip
    """Trains with a trace; each of several ranks has its part of every batch."""
    fault = fault or Fault()
    shutil.rmtree(folder, ignore_errors=True)
    model = wrap(model)
    fault.on_start(model, optimizer)
    with Trace(model, optimizer, folder, start=start, **options) as trace:
        for step in range(start, start + steps):
            fault.on_step(step, model, optimizer)
            tokens, targets = fault.on_batch(step, *batch(step))
            optimizer.zero_grad()
            mean = 0.0
            for part in range(micros):
                mine = slice(part * world + rank, None, micros * world)
                loss = fault.on_loss(step, loss_of(model, tokens[mine], targets[mine]) / micros)
                loss.backward()
                mean += loss.detach()
            fault.on_gradients(step, model, optimizer)
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            fault.on_end(step, model, optimizer)
            trace.step(mean)
    return model
