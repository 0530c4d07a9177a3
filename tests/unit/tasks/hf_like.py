"""Stand-ins for Hugging Face: models with logits and a loss."""

from types import SimpleNamespace

import torch.nn.functional as F
from torch import nn

WORDS = 7


class Table(nn.Module):
    """Logits of a token are a row of a table."""

    def __init__(self, classes=WORDS):
        super().__init__()
        self.table = nn.Embedding(WORDS, classes)
        self.dropout = nn.Dropout(0.5)

    def logits(self, input_ids):
        return self.dropout(self.table(input_ids))


class TinyLMHeadModel(Table):
    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.logits(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(logits=logits, loss=loss)


class TinyForMaskedLM(Table):
    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(logits=logits, loss=loss)


class TinyForSequenceClassification(Table):
    def __init__(self):
        super().__init__(classes=3)

    def forward(self, input_ids, labels=None):
        logits = self.logits(input_ids).mean(1)
        loss = None if labels is None else F.cross_entropy(logits, labels)
        return SimpleNamespace(logits=logits, loss=loss)
