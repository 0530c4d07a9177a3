"""A character language model on the Python standard library's own source."""

import platform
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from steadygrad._checks import check_count
from steadygrad.tasks.corpus import OTHER, encode, read_corpus
from steadygrad.tasks.task import Task

__all__ = ["CharTransformer", "WindowSamples", "char_lm"]


class WindowSamples:
    """Windows of a text as (inputs, targets), both int64 with shape ``(n, context)``.

    Args:
        tokens: The text, uint8 with shape ``(L,)``.
        context: Characters in one window; the targets are the same window one character later.
        starts: First character of each window, int64 with shape ``(N,)``; None: every window
            that does not overlap another; none in a text without a last target.
    """

    def __init__(self, tokens: Tensor, context: int, starts: Tensor | None = None) -> None:
        self.tokens = tokens
        self.context = context
        last = max(len(tokens) - context, 0)
        self.starts = torch.arange(0, last, context) if starts is None else starts

    def __len__(self) -> int:
        return len(self.starts)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Collects the windows ``indices``, with shape ``(n,)``."""
        offsets = self.starts[indices, None] + torch.arange(self.context + 1)
        windows = self.tokens[offsets].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def spread(self, count: int) -> "WindowSamples":
        """A fixed choice of ``count`` windows (or all, if fewer), evenly over the text."""
        count = min(count, len(self))
        chosen = torch.arange(count) * len(self) // count
        return WindowSamples(self.tokens, self.context, self.starts[chosen])


class Block(nn.Module):
    """One pre-norm transformer block on ``(B, T, width)``, causal."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention_out(self._attend(self.qkv(self.attention_norm(x))))
        x = x + attended
        changed: Tensor = self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return x + changed

    def _attend(self, qkv: Tensor) -> Tensor:
        """Causal attention: ``(B, T, 3 * width)`` to ``(B, T, width)``."""
        n, length, _ = qkv.shape
        q, k, v = qkv.view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class CharTransformer(nn.Module):
    """A small decoder-only transformer over characters.

    Every layer's input has the batch as its leading dimension, positions included, so that exact
    per-example gradient norms can be taken.

    Args:
        vocabulary: Number of tokens.
        context: Longest sequence.
        width: Features of the residual stream; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads of a block.
    """

    def __init__(
        self,
        vocabulary: int,
        *,
        context: int = 64,
        width: int = 96,
        layers: int = 2,
        heads: int = 4,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self._initialise(layers)

    def _initialise(self, layers: int) -> None:
        """GPT-2's rule: normal(0, 0.02), and residual outputs divided by sqrt(2 * layers)."""
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("attention_out", "mlp_out"))
                std = 0.02 / (2 * layers) ** 0.5 if residual else 0.02
                nn.init.normal_(module.weight, std=std)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character.

        Args:
            tokens: int64 with shape ``(B, T)``, ``T <= context``.

        Returns:
            Logits with shape ``(B, T, vocabulary)``.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def char_lm(
    *,
    context: int = 64,
    width: int = 96,
    layers: int = 2,
    heads: int = 4,
    valid_sequences: int = 256,
    folder: Path | None = None,
) -> Task:
    """The default task: predict the next character of the Python standard library's source.

    Args:
        context: Characters in one sequence, which is one sample.
        width: Features of the model's residual stream.
        layers: Blocks of the model.
        heads: Attention heads of a block.
        valid_sequences: Sequences of the fixed validation set.
        folder: Corpus of Python source; None: the running Python's standard library.

    Returns:
        The task.

    Raises:
        InputError: If a size is out of range or there is no corpus.
    """
    sizes = {"context": context, "width": width, "layers": layers, "heads": heads}
    for name, value in {**sizes, "valid_sequences": valid_sequences}.items():
        check_count(name, value)
    train, valid, provenance = _data(folder, context)
    return Task(
        name="char-lm",
        sample="sequence",
        make_model=partial(CharTransformer, OTHER + 1, **sizes),
        train=train,
        valid=valid.spread(valid_sequences),
        per_sample_loss=sequence_losses,
        make_optimizer=partial(AdamW, betas=(0.9, 0.95)),
        lr=2e-3,
        batch_size=8,
        lr_rule="sqrt",
        samples_per_second=1_000.0,
        provenance=provenance,
        tokens_per_sample=context,
    )


def sequence_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of each sequence in nats a character, with shape ``(n,)``."""
    inputs, targets = batch
    logits = model(inputs)
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    return losses.view_as(targets).mean(1)


def _data(folder: Path | None, context: int) -> tuple[WindowSamples, WindowSamples, dict[str, str]]:
    corpus = read_corpus(folder)
    train, valid = (
        WindowSamples(_tokens(text for _, text in files), context)
        for files in (corpus.train, corpus.valid)
    )
    source = "Python standard library source" if folder is None else "Python source"
    provenance = {
        "corpus": f"{source}, Python {platform.python_version()}",
        "files": f"{len(corpus.train)} training, {len(corpus.valid)} held out",
        "characters": f"{len(train.tokens)} training, {len(valid.tokens)} held out",
        "sha256": corpus.sha256,
        "skipped": ", ".join(corpus.skipped) or "none",
    }
    return train, valid, provenance


def _tokens(texts: Iterable[str]) -> Tensor:
    data = bytearray().join(encode(text) for text in texts)
    return torch.frombuffer(data, dtype=torch.uint8)
