"""Plain loops with literal formulas, which the trainers are compared with, and what they train."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from steadygrad.noise import BatchSizeSchedule

IGNORED, VOCABULARY = -100, 31
# Rows of a micro-batch, micro-batches and steps that the trainers train with, and processes.
ROWS, ACCUMULATION, STEPS, RANKS = 2, 4, 6, 2

# Windows of 2, 3 and 6 micro-batches: 10 samples are 5 of them, and the first multiple of 3 that
# ends a window of 2 is 6. After 30 samples come 15, and the first multiple of 6 that ends a window
# of 3 is 18, or the next epoch.
GROWS = BatchSizeSchedule(
    [
        {"from_samples": 0, "batch_size": 4},
        {"from_samples": 10, "batch_size": 6},
        {"from_samples": 30, "batch_size": 12},
    ]
)


def gpt2():
    """A tiny GPT-2 with the same random weights at each call."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def adamw(model, lr=1e-2):
    """The optimizer of most trainings."""
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)


def token_batches(count, rows=2, length=12):
    """Batches of tokens whose labels are padded, each row by another length."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(count):
        # Some tokens are much more frequent, so that there is something to learn at once.
        tokens = (torch.rand(rows, length, generator=generator) ** 3 * VOCABULARY).long()
        kept = torch.randint(3, length + 1, (rows, 1), generator=generator)
        labels = torch.where(torch.arange(length) < kept, tokens, IGNORED)
        batches.append({"input_ids": tokens, "labels": labels})
    return batches


def rows_from(batches):
    """The single rows of batches, which a trainer's own loader puts together again."""
    return [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(ROWS)]


def chunks(batches, size=ACCUMULATION):
    """Windows of so many micro-batches."""
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def labelled(batch):
    """Number of labels that a causal model is trained on."""
    return int((batch["labels"][:, 1:] != IGNORED).sum())


def summed_loss(model, batch, dtype=torch.bfloat16):
    """Sum of the cross-entropies of the next tokens, in float32 from autocast logits."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        logits = model(input_ids=batch["input_ids"]).logits
    return next_tokens(logits, batch["labels"], "sum")


def next_tokens(logits, labels, reduction="mean"):
    """Cross-entropy of the next tokens, in float32."""
    flat, targets = logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(flat, targets, ignore_index=IGNORED, reduction=reduction)


def assert_measured(noise, expected):
    """A noise scale is that of the loop by hand, over as many steps."""
    estimate = noise.estimate()
    assert int(estimate.measurements) == len(expected.noises)
    assert int(noise.altered) == int(noise.skipped) == 0
    # 1e-5 would do, but not in float16, where subnormal gradients round, nor over processes.
    assert float(estimate.value) == pytest.approx(expected.value, rel=1e-3)


def found_on_rank(noise):
    """What a process hands back of its noise scale."""
    return {
        "value": float(noise.estimate().value),
        "kind": noise.world.kind,
        "altered": int(noise.altered),
    }


def assert_measured_on_ranks(found, kind, expected):
    """All processes have the same noise scale, that of one loop by hand."""
    assert {(row["kind"], row["altered"]) for row in found} == {(kind, 0)}
    assert len({row["value"] for row in found}) == 1
    assert found[0]["value"] == pytest.approx(expected.value, rel=1e-3)  # as above


class BadBackward(torch.nn.Module):
    """Its backward pass divides zero by zero, if it is told to."""

    broken = False

    def forward(self, x):
        return x + (0 * x).abs().sqrt() if self.broken else 2 * x


def assert_trained_alike(found, wanted, start):
    """Two models have moved alike from their start.

    Sums of micro-batches and processes differ in their last float32 digits. Adam divides a gradient
    by its own size, so that an element whose gradient is nearly zero may move by another part of a
    step. Over all elements the difference stays small beside the way.
    """
    flat = [
        torch.cat([p.detach().flatten().double() for p in model.parameters()])
        for model in (found, wanted, start)
    ]
    assert (flat[0] - flat[1]).norm() < 1e-3 * (flat[1] - flat[2]).norm()


def flat_gradient(parameters):
    """All gradients as one float64 vector."""
    return torch.cat([p.grad.double().flatten() for p in parameters])


class NoiseByHand:
    r"""Averages of signal and noise over steps, from gradients of parts, in float64.

    .. math:: \mathrm{tr} = \frac{\sum_j w_j |g_j|^2 - |\sum_j w_j g_j|^2}
              {\sum_j w_j / n_j - \sum_j w_j^2 / n_j}, \qquad
              |G|^2 = |\sum_j w_j g_j|^2 - \mathrm{tr} \sum_j w_j^2 / n_j
    """

    def __init__(self):
        self.signals, self.noises = [], []

    def step(self, gradients, weights, counts):
        """Takes in the parts' mean gradients, their weights, which sum to 1, and sample counts."""
        mean = sum(w * g for w, g in zip(weights, gradients, strict=True))
        squares = sum(w * float(g @ g) for w, g in zip(weights, gradients, strict=True))
        once = sum(w / n for w, n in zip(weights, counts, strict=True))
        twice = sum(w * w / n for w, n in zip(weights, counts, strict=True))
        noise = (squares - float(mean @ mean)) / (once - twice)
        self.noises.append(noise)
        self.signals.append(float(mean @ mean) - noise * twice)

    def average(self, numbers):
        """Average over the steps, the newest with a weight of 1."""
        weights = [0.99**age for age in range(len(numbers) - 1, -1, -1)]
        return sum(w * x for w, x in zip(weights, numbers, strict=True)) / sum(weights)

    @property
    def value(self):
        """Ratio of the averages."""
        return self.average(self.noises) / self.average(self.signals)


def train_by_hand(
    model,
    windows,
    optimizer,
    *,
    by_tokens=True,
    clip=1.0,
    dtype=torch.bfloat16,
    uncounted=0,
    ranks=1,
):
    """Trains a causal model on windows of micro-batches; returns the noise scale measured.

    Args:
        model: The model.
        windows: The micro-batches of each step.
        optimizer: Its optimizer.
        by_tokens: Whether the step's loss is a mean over its labels; if not, over micro-batches.
        clip: Largest norm of a step's gradient; None: it is not clipped.
        dtype: Type of autocast; None: there is none.
        ranks: Processes, each of which divides by the labels of its own share of a window.
        uncounted: Labels by which the trainer's own divisor of a row is too large.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    noise = NoiseByHand()
    for window in windows:
        counts = [labelled(batch) for batch in window]
        total = sum(counts)
        share = len(window) // ranks
        own = [sum(counts[i // share * share :][:share]) for i in range(len(window))]
        pairs = zip(counts, own, strict=True)
        weights = [n / of / ranks if by_tokens else 1 / len(window) for n, of in pairs]
        gradients, held = [], None
        for batch, weight, count in zip(window, weights, counts, strict=True):
            optimizer.zero_grad()
            # The factor that the trainer's own backward pass has, so that roundings are the same.
            factor = total / (total + uncounted * sum(len(each["labels"]) for each in window))
            (summed_loss(model, batch, dtype) * (weight / count * factor)).backward()
            gradients.append(flat_gradient(parameters) / (weight * factor))
            each = [p.grad.clone() for p in parameters]
            held = each if held is None else [a + b for a, b in zip(held, each, strict=True)]
        if len(window) > 1:
            noise.step(gradients, weights, [len(batch["labels"]) for batch in window])
        for parameter, gradient in zip(parameters, held, strict=True):
            parameter.grad = gradient
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return noise
