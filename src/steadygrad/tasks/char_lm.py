"""A character language model on the Python standard library's own source: real data everywhere."""

import hashlib
import os
import platform
import re
import sysconfig
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

from steadygrad._checks import InputError
from steadygrad.tasks.samples import TensorSamples
from steadygrad.tasks.task import Task

# Printable ASCII and the line feed, then one token that stands for everything else.
VOCABULARY = "\n" + "".join(chr(code) for code in range(32, 127))
OTHER = len(VOCABULARY)
VALID_SEQUENCES = 256
# Blocks of the model, and attention heads of each.
LAYERS, HEADS = 2, 4

# Tests, other people's packages and caches come and go with how Python was packaged; `encodings`
# and `pydoc_data` are generated tables, and `config-*` describes the machine Python was built on.
SKIPPED_FOLDERS = re.compile(
    r"tests?|idle_test|__pycache__|(site|dist)-packages|encodings|pydoc_data|config-.*"
)
SKIPPED_FILES = re.compile(r"(_sysconfigdata.*|(site|user)customize)\.py")

_UNKNOWN = re.compile(r"[^ -~\n]")
# The token, in ``[0, OTHER]``, of each byte.
_TO_TOKEN = bytes(VOCABULARY.find(chr(code)) % (OTHER + 1) for code in range(256))


def char_lm(*, context: int = 64, width: int = 96) -> Task:
    """The default task: predict the next character of the Python standard library's source.

    A batch is inputs and targets, both uint8 with shape ``(n, context)``.

    Args:
        context: Characters in one sequence, which is one sample.
        width: Features of the model's residual stream, a multiple of 4.

    Raises:
        InputError: If there is no such source on this machine.
    """
    *texts, provenance = read_corpus()
    train, valid = (windows(text, context) for text in texts)
    valid = valid[torch.arange(VALID_SEQUENCES) * len(valid) // VALID_SEQUENCES]
    return Task(
        name="char-lm",
        sample="sequence",
        make_model=partial(CharTransformer, OTHER + 1, context=context, width=width),
        train=TensorSamples((train[:, :-1], train[:, 1:])),
        valid=TensorSamples((valid[:, :-1], valid[:, 1:])),
        per_sample_loss=sequence_losses,
        make_optimizer=partial(AdamW, betas=(0.9, 0.95)),
        lr=2e-3,
        batch_size=8,
        samples_per_second=1_000.0,
        provenance=provenance,
        tokens_per_sample=context,
    )


class Block(nn.Module):
    """One causal transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """``(n, T, width)`` to the same."""
        n, length, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(n, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        y: Tensor = x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))
        return y


class CharTransformer(nn.Module):
    """A small decoder-only transformer: tokens ``(n, T)`` to logits ``(n, T, vocabulary)``.

    Every layer's input has the batch as its leading dimension, positions included, so that exact
    per-example gradient norms can be taken.
    """

    def __init__(self, vocabulary: int, *, context: int = 64, width: int = 96) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        # GPT-2's rule: normal(0, 0.02), and residual outputs divided by sqrt(2 * layers).
        for name, module in self.named_modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                residual = name.endswith(("attention_out", "mlp_out"))
                nn.init.normal_(module.weight, std=0.02 / ((2 * LAYERS) ** 0.5 if residual else 1))
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next character, of at most ``context`` tokens of any integer type."""
        tokens = tokens.long()
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        x = self.tokens(tokens) + self.positions(positions)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def sequence_losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross-entropy of each sequence in nats a character, with shape ``(n,)``."""
    inputs, targets = batch
    logits = model(inputs).flatten(0, 1)
    losses = F.cross_entropy(logits, targets.flatten().long(), reduction="none")
    return losses.view_as(targets).mean(1)


def windows(text: str, context: int) -> Tensor:
    """Windows of a text and the character after each: uint8 with shape ``(N, context + 1)``."""
    known = bytearray(_UNKNOWN.sub("\0", text).encode("ascii"))
    tokens = torch.frombuffer(known.translate(_TO_TOKEN), dtype=torch.uint8)
    return tokens.unfold(0, context + 1, context)


def read_corpus(folder: Path | None = None) -> tuple[str, str, dict[str, str]]:
    """Text of the training and of the held-out Python files under a folder, and its provenance.

    About 5 % of the files, chosen by a hash of their path, are held out whole. The SHA-256 is of
    every file's path, length and bytes, in the order of the paths.

    Raises:
        InputError: If the folder has too few files for a held-out set, or is none.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    digest = hashlib.sha256()
    texts: dict[bool, list[str]] = {False: [], True: []}
    for name in source_names(root):
        data = (root / name).read_bytes()
        # The length closes off the name and the text: no two corpora share a byte stream.
        digest.update(f"{name}\0{len(data)}\0".encode() + data)
        held_out = hashlib.sha256(name.encode()).digest()[0] < 13
        text = data.decode("utf-8", errors="replace")
        texts[held_out].append(text.replace("\r\n", "\n"))
    if not texts[False] or not texts[True]:
        raise InputError(
            "The corpus should have training and held-out files (about one in twenty, by a hash "
            f"of the path). Found {len(texts[False])} and {len(texts[True])} under {root}. "
            "Remedy: a folder with more Python source, as of a regular (no zipped) installation."
        )
    train, valid = "".join(texts[False]), "".join(texts[True])
    provenance = {
        "corpus": f"Python standard library source, Python {platform.python_version()}",
        "files": f"{len(texts[False])} training, {len(texts[True])} held out",
        "characters": f"{len(train)} training, {len(valid)} held out",
        "sha256": digest.hexdigest(),
    }
    return train, valid, provenance


def source_names(root: Path) -> list[str]:
    """Posix paths, relative to ``root``, of the corpus's files in sorted order."""
    names = []
    for parent, folders, files in os.walk(root):
        folders[:] = [name for name in folders if not SKIPPED_FOLDERS.fullmatch(name)]
        kept = [f for f in files if f.endswith(".py") and not SKIPPED_FILES.fullmatch(f)]
        names += [(Path(parent) / name).relative_to(root).as_posix() for name in kept]
    return sorted(names)
