"""
Is my gradient accumulation right?
==================================

Accumulation adds up the gradients of several micro-batches before one step. The sum should be the
gradient of the whole batch. A language model's loss is a mean over *tokens*, and micro-batches of
texts hold different numbers of them. A loop that divides each micro-batch's mean by the number of
micro-batches takes a **mean of means**: tokens of short texts count more. Nothing fails, and the
loss still falls.
"""

import builtins
import inspect
import textwrap
from collections.abc import Callable, Sequence

import matplotlib.pyplot as plt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from steadygrad.watch import check_accumulation

torch.set_num_threads(1)  # tensors this small only wait for each other
IGNORED, MICRO_BATCHES, SIZE = -100, 4, 16
Batch = dict[str, Tensor]

# %%
# Texts of different lengths
# --------------------------
#
# The texts are the documentation of Python's built-in functions and classes, of at most 300
# characters each. A model predicts each character from the twelve before it. Places behind the end
# of a text have the label -100, which ``cross_entropy`` leaves out.

documented = [inspect.getdoc(value) or "" for _, value in sorted(vars(builtins).items())]
texts = [text.encode("ascii", "replace")[:300] for text in dict.fromkeys(documented) if text]


def collate(rows: Sequence[bytes]) -> Batch:
    """Characters and the next ones, padded, with shape (n, longest - 1)."""
    codes = [torch.tensor(list(text)) for text in rows]
    return {
        "inputs": pad_sequence([code[:-1] for code in codes], batch_first=True),
        "labels": pad_sequence([code[1:] for code in codes], True, padding_value=IGNORED),
    }


class Characters(nn.Module):
    """A language model that sees the last 12 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = (
            nn.Embedding(128, 32),
            nn.Conv1d(32, 64, 12),
            nn.Linear(64, 128),
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits with shape (n, length, 128)."""
        seen = F.pad(self.embed(inputs).mT, (11, 0))
        return self.head(F.gelu(self.mix(seen).mT))


def loss_fn(model: nn.Module, batch: Batch, reduction: str = "mean") -> Tensor:
    """The mean over the tokens of a batch; or their sum."""
    logits, labels = model(batch["inputs"]).flatten(0, 1), batch["labels"].flatten()
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction=reduction)


def tokens_in(batch: Batch) -> int:
    return int((batch["labels"] != IGNORED).sum())


torch.manual_seed(0)
model = Characters()
order = torch.randperm(len(texts)).tolist()
batch = collate([texts[i] for i in order[:SIZE]])
print(f"{len(texts)} texts of {min(map(len, texts))} to {max(map(len, texts))} characters")

# %%
# Ask for the bug
# ---------------
#
# ``check_accumulation`` is given the loss as it should be on a whole batch, and the loop's own code
# for one window. It cuts one batch in four ways, and compares the gradients that the window leaves
# with the whole batch's.


def mean_of_means(micros: Sequence[Batch]) -> None:
    for micro in micros:
        (loss_fn(model, micro) / len(micros)).backward()


found = check_accumulation(
    model, loss_fn, batch, accumulate=mean_of_means, micro_batches=MICRO_BATCHES
)
for window in found.windows:
    print(f"{window.name:22} ratio {window.ratio:.3f}, cosine {window.cosine:.3f}: {window.bug}")
print(textwrap.fill(found.windows[0].words, 96))

# %%
# The ratio is that of the gradients' norms. A cosine below one means that the direction is wrong as
# well, which no learning rate mends.
#
# The remedy
# ----------
#
# Count the tokens of the whole window first, add up the losses of all tokens, and divide once.


def by_tokens(micros: Sequence[Batch]) -> None:
    tokens = sum(map(tokens_in, micros))
    for micro in micros:
        (loss_fn(model, micro, reduction="sum") / tokens).backward()


found = check_accumulation(model, loss_fn, batch, accumulate=by_tokens, micro_batches=MICRO_BATCHES)
print(found)
assert not found.bugs

# %%
# How wrong was it?
# -----------------
#
# A mean of means gives each micro-batch the same weight. Right is its share of the tokens. The
# model first learns for some steps by the right loop, for the gradients of a new model are alike.


def gradient(window: Callable[[Sequence[Batch]], None], micros: Sequence[Batch]) -> Tensor:
    model.zero_grad()
    window(micros)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def cut(rows: Sequence[int]) -> list[Batch]:
    """The micro-batches of a window."""
    count = SIZE // MICRO_BATCHES
    return [collate([texts[i] for i in rows[at : at + count]]) for at in range(0, SIZE, count)]


optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
for _ in range(60):
    gradient(by_tokens, cut(torch.randperm(len(texts))[:SIZE].tolist()))
    optimizer.step()

micros = cut(order[:SIZE])
wrong, right = gradient(mean_of_means, micros), gradient(by_tokens, micros)
counts = [tokens_in(micro) for micro in micros]
print(f"tokens of the micro-batches: {', '.join(map(str, counts))}")
print(f"weight of a token, largest over smallest: {max(counts) / min(counts):.2f}, should be 1")
print(f"error of the gradient: {(wrong - right).norm() / right.norm():.0%} of its norm")

figure, (left, middle) = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
places = range(MICRO_BATCHES)
shares = [count / sum(counts) for count in counts]
left.bar([i - 0.2 for i in places], 1 / MICRO_BATCHES, 0.38, label="mean of means", color="#e69f00")
left.bar([i + 0.2 for i in places], shares, 0.38, label="by tokens", color="#0072b2")
left.set(xlabel="micro-batch", ylabel="weight in the gradient", xticks=places)
left.legend(frameon=False)
middle.plot(right.tolist(), wrong.tolist(), ".", markersize=2, color="#e69f00", rasterized=True)
middle.axline((0, 0), slope=1, color="0.4", linewidth=1)
middle.set(xlabel="gradient by tokens", ylabel="gradient of the mean of means")

# %%
# Each dot on the right is one element of the gradient. All would lie on the line if both gradients
# were equal.
#
# Other batches are wrong by other amounts. Here are the errors of twenty batches of texts in random
# order, and of twenty whose micro-batches have texts of like lengths, as loaders make them to save
# padding.


def errors(windows: Sequence[Sequence[int]]) -> list[float]:
    """The gradient's relative error in each window."""
    found = []
    for rows in windows:
        wrong, right = (gradient(loop, cut(rows)) for loop in (mean_of_means, by_tokens))
        found.append(float((wrong - right).norm() / right.norm()))
    return found


COUNT = 20
grouped = torch.tensor(sorted(range(len(texts)), key=lambda i: len(texts[i])))
grouped = grouped[: len(texts) // 4 * 4].view(-1, 4)  # micro-batches of four texts
windows = {
    "random order": [torch.randperm(len(texts))[:SIZE].tolist() for _ in range(COUNT)],
    "like lengths together": [
        grouped[torch.randperm(len(grouped))[:MICRO_BATCHES]].flatten().tolist()
        for _ in range(COUNT)
    ],
}
figure, axis = plt.subplots(figsize=(7, 2.6), layout="constrained")
for place, (name, rows) in enumerate(windows.items()):
    sizes = errors(rows)
    middle_one = sorted(sizes)[COUNT // 2]
    print(
        f"{name:22} error of the gradient {min(sizes):.0%} to {max(sizes):.0%} of its norm, "
        f"median {middle_one:.0%}"
    )
    axis.plot(sizes, [place] * COUNT, "o", alpha=0.5)
axis.set(xlabel="error of the gradient over its norm", xlim=(0, None), ylim=(-0.5, 1.5))
axis.set_yticks(range(2), list(windows))

# %%
# What to do with the answer
# --------------------------
#
# - Make the check once, before a long run, on a real batch with real padding. Texts of equal length
#   hide this bug.
# - Several processes have the same bug: each divides by its own tokens, and the gradients are
#   averaged. Divide by the tokens of all processes, times the number of processes.
# - A mean of means is no bug if it is what you want: every text counts alike then. Say so in
#   ``loss_fn``, and the check judges by that.
# - :doc:`/watch` lists the other bugs that the check names, such as a gradient that is cleared
#   within the window, and what the ratio says of one without a name.
