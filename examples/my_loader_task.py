"""A task from a data loader: ``steadygrad advise examples/my_loader_task.py:make_task``.

The model, the data set, its ``collate_fn`` and the loss stay those of the training loop. Only the
loss is one for each sample, not their mean. Here rows of different lengths are classified.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from steadygrad.tasks import Task


class Walks(Dataset):
    """Random walks of 5 to 20 steps, and whether they end above zero."""

    def __init__(self, count: int, first: int) -> None:
        self.count, self.first = count, first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.first + index)
        steps = torch.randn(5 + index % 16, generator=generator)
        return steps, int(steps.sum() > 0)


def collate(rows: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor, Tensor]:
    steps, labels = zip(*rows, strict=True)
    lengths = torch.tensor([len(walk) for walk in steps])
    return pad_sequence(list(steps), batch_first=True), lengths, torch.tensor(labels)


class Classifier(nn.Module):
    """Two logits from the state after a row's last step."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 2)

    def forward(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Logits with shape (n, 2) of padded steps with shape (n, longest)."""
        states, _ = self.rnn(steps.unsqueeze(2))
        return self.head(states[torch.arange(len(states)), lengths - 1])


def losses(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    steps, lengths, labels = batch
    return F.cross_entropy(model(steps, lengths), labels, reduction="none")


def make_task() -> Task:
    loader = DataLoader(Walks(4_096, 0), batch_size=8, shuffle=True, collate_fn=collate)
    return Task.from_dataloader(
        loader,
        valid=DataLoader(Walks(512, 10_000), batch_size=8, collate_fn=collate),
        make_model=Classifier,
        per_sample_loss=losses,
        lr=1e-2,  # for batches of 8, by AdamW; studies search around it
        warmup_samples=400,
        lr_decay="cosine",
    )
