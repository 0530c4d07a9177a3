"""What a study refuses before any training, and what it lets in: factories and losses."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, AdamW, RAdam, Rprop, lr_scheduler

import steadygrad
from steadygrad._checks import InputError
from steadygrad.studies.advise.schema import Noise
from steadygrad.studies.course import Order
from steadygrad.studies.folder import DEPENDENT, read_run
from tests.refusals import refused
from tests.unit.studies.framework import begin, go_on, make_trainer
from tests.unit.studies.tiny_task import boom, centered, losses, make_model, make_task, mean


def enter(*, dtype="float32", **changes):
    trainer = make_trainer(make_task(**changes), dtype=dtype)
    trainer.check_task()
    return trainer


# Models


def body(*, frozen=False, norm=False):
    parts = [nn.Linear(8, 16), *([nn.BatchNorm1d(16)] if norm else [])]
    return nn.Sequential(*parts).requires_grad_(not frozen)


def with_norm():
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.1), nn.Linear(16, 1))


def around(part):
    """A maker of models that share a part."""
    return lambda: nn.Sequential(part, nn.Tanh(), nn.Linear(16, 1))


def copies():
    """Each a copy of the one before, as training left that."""
    made = [make_model()]

    def make():
        made.append(copy.deepcopy(made[-1]))
        return made[-1]

    return make


def pretrained():
    state = make_model().state_dict()

    def make():
        torch.manual_seed(3)
        model = make_model()
        model.load_state_dict(state)
        return model

    return make


# Optimizers


def again():
    made = []

    def make(parameters, lr):
        made.append(SGD(parameters, lr=lr, momentum=0.9))
        return made[0]

    return make


def with_another(parameter):
    return lambda parameters, lr: SGD([*parameters, parameter], lr=lr)


EXTRA = nn.Parameter(torch.ones(8))
OTHER = make_model()


def thousandfold(model, batch):
    return 1e3 * losses(model, batch)


def with_extra(model, batch):
    return losses(model, (batch[0] * EXTRA, batch[1]))


def trains(model, samples):
    """An evaluation that leaves other weights."""
    nn.init.zeros_(model[0].weight)
    return 1.0


class Turn(nn.Bilinear):
    """A complex weight."""

    def forward(self, x):
        return (x.float() * self.weight[0]).real


class Renormed(nn.Linear):
    """A weight that each forward pass of a training changes in place."""

    def forward(self, x):
        self.weight.data.mul_(0.5 if self.training else 1.0)
        return super().forward(x)


def turned():
    return nn.Sequential(*make_model(), Turn(1, 1, 1, bias=False, dtype=torch.complex64))


REFUSED = {
    # Models that carry weights on.
    "make_model": [
        {"make_model": copies()},
        {"make_model": around(body())},
        {"make_model": around(body(frozen=True, norm=True))},
        {"make_model": lambda: nn.Sequential(nn.LazyLinear(1))},
        {"make_model": lambda: make_model().to("meta")},
        {"make_model": turned, "dtype": "float16"},
        # Where an ordinary first step would not move the weights.
        {"make_model": copies(), "warmup_samples": 64},
        {"make_model": copies(), "dtype": "float16", "per_sample_loss": thousandfold},
    ],
    # Optimizers that are not new, or not as asked.
    "make_optimizer": [
        {"make_optimizer": again()},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=0.5)},
        # As Adafactor with steps of its own choice.
        {"make_optimizer": lambda ps, lr: SGD([{"params": ps, "lr": None}])},
        {"make_optimizer": with_another(EXTRA), "per_sample_loss": with_extra},
        {"make_optimizer": lambda ps, lr: SGD(OTHER.parameters(), lr)},
    ],
    "optimizer_takes": [
        {"make_optimizer": lambda model, lr: SGD(model.parameters(), lr)},
        {"make_optimizer": lambda ps, lr: SGD([*ps], lr), "optimizer_takes": "model"},
    ],
    "step of the optimizer": [{"make_optimizer": torch.optim.LBFGS}],
    "per_sample_loss": [
        {"per_sample_loss": lambda model, batch: losses(OTHER, batch)},
        {"per_sample_loss": lambda model, batch: losses(model, batch).mean()},
        {"make_model": lambda: nn.Linear(5, 1)},
    ],
    "Task.evaluate": [
        {"evaluate": boom},
        {"evaluate": lambda model, samples: None},
        {"evaluate": trains},
    ],
}


@pytest.mark.parametrize(
    ("name", "changes"), [(name, changes) for name in REFUSED for changes in REFUSED[name]]
)
def test_what_is_refused(name, changes):
    with pytest.raises(InputError, match=f"{name}.*Remedy"):
        enter(**changes)


def borrows(model, samples):
    """An evaluation with other weights, which are put back."""
    own = copy.deepcopy(model.state_dict())
    nn.init.zeros_(model[0].weight)
    loss = mean(model, samples)
    model.load_state_dict(own)
    return loss


@pytest.mark.parametrize(
    "changes",
    [
        # Models that are new or meant to be alike.
        {"make_model": around(body(frozen=True))},
        {"make_model": pretrained()},
        # A part that no optimizer has may be shared.
        {"make_model": around(body()), "make_optimizer": lambda ps, lr: SGD(ps[2:], lr=lr)},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=0.001)},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=torch.tensor(lr))},
        {"make_optimizer": with_another(nn.Parameter(torch.zeros(1)))},
        {"warmup_samples": 64, "lr_decay": "cosine"},
        {"evaluate": borrows},
        {"make_model": turned, "dtype": "bfloat16"},
        {
            "make_model": lambda: turned().requires_grad_(False).append(nn.Linear(1, 1)),
            "dtype": "float16",
        },
    ],
)
def test_what_is_let_in(changes):
    enter(**changes)


# Rates that an optimizer sets itself


def scheduled(kind, *args, steps=False):
    """With a scheduler of torch, which its hook may step."""

    def make(parameters, lr):
        optimizer = SGD(parameters, lr)
        optimizer.scheduler = kind(optimizer, *args)
        if steps:
            optimizer.register_step_post_hook(lambda *_: optimizer.scheduler.step(1.0))
        return optimizer

    return make


def hooked(after=0, tensor=False, **factors):
    """With hooks around a step that multiply the last group's rate; ``after`` so many calls."""

    def make(parameters, lr):
        optimizer, calls = SGD(parameters, torch.tensor(lr) if tensor else lr), []

        def hook(optimizer, arguments, options, factor):
            calls.append(factor)
            if len(calls) > after:
                optimizer.param_groups[-1]["lr"] *= factor

        for kind, factor in factors.items():
            getattr(optimizer, f"register_step_{kind}_hook")(partial(hook, factor=factor))
        return optimizer

    return make


def begun_low(parameters, lr):
    """As a scheduler of timm leaves it."""
    return SGD([{"params": parameters, "lr": lr / 20, "initial_lr": lr}])


class Sets(SGD):
    def step(self):
        self.param_groups[0]["lr"] *= 0.5
        super().step()


class Ignores(SGD):
    """Steps at a rate of its own."""

    def __init__(self, parameters, lr, rate=lambda lr, *_: lr):
        super().__init__(parameters, lr)
        self.own, self.rate, self.steps = lr, rate, 0

    @torch.no_grad()
    def step(self):
        group, self.steps = self.param_groups[0], self.steps + 1
        for p in group["params"]:
            p.sub_(p.grad, alpha=self.rate(self.own, group["lr"], self.steps))


class Waits(SGD):
    """Moves nothing in its first steps."""

    wait = 5

    def step(self):
        self.wait -= 1
        if self.wait < 0:
            super().step()


@pytest.mark.parametrize(
    "make",
    [
        scheduled(lr_scheduler.LambdaLR, lambda k: (k + 1) / 20, steps=True),
        # These act by being made.
        scheduled(lr_scheduler.LinearLR),
        lambda ps, lr: scheduled(lr_scheduler.CyclicLR, lr / 9, lr)(ps, lr),
        begun_low,
        scheduled(lr_scheduler.ReduceLROnPlateau, "min", 0.1, 20, steps=True),
        hooked(pre=0.5),
        hooked(post=0.5),
        hooked(pre=0.5, post=2.0),
        hooked(pre=0.5, post=2.0, tensor=True),
        # In the training itself.
        hooked(post=0.5, after=100),
        Sets,
        Ignores,
        # After a step that moves nothing; above a limit.
        partial(Ignores, rate=lambda own, lr, step: own * (step > 1)),
        partial(Ignores, rate=lambda own, lr, step: min(own, lr)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_optimizer_that_sets_its_own_rate_is_refused(make, dtype):
    with refused("tiny", "learning rate", "Task.lr_decay"):
        list(enter(make_optimizer=make, dtype=dtype).run(Order(4096, 0), 0, 640, 4))


@pytest.mark.parametrize("study", ["advise", "compare", "inspect", "ab"])
def test_every_study_refuses_it(study, tmp_path):
    tasks = [make_task(name="B", make_optimizer=Sets)]
    if study == "ab":
        tasks.insert(0, make_task())
    with refused("of B "):
        getattr(steadygrad, study)(*tasks, budget=30, out=str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"make_optimizer": lambda ps, lr: SGD([{"params": ps, "lr": lr, "initial_lr": lr}])},
        {"make_optimizer": lambda ps, lr: SGD(ps, lr=torch.tensor(lr))},
        {"make_optimizer": lambda ps, lr: SGD([{"params": [p], "lr": 9 * lr} for p in ps])},
        {"make_optimizer": Rprop, "batch_size": 64},
        # Statistics move without it.
        {"make_optimizer": Waits, "make_model": with_norm, "batch_size": 8},
        {"make_optimizer": RAdam, "warmup_samples": 1 << 40},
        {"make_optimizer": AdamW, "lr": 1e-30},
        # A weight that the optimizer does not have, and one that it does.
        {
            "make_model": lambda: nn.Sequential(Renormed(8, 16), Renormed(16, 1)),
            "make_optimizer": lambda ps, lr: SGD(ps[2:], lr),
        },
        {"make_optimizer": AdamW, "per_sample_loss": lambda model, batch: 0 * losses(model, batch)},
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_optimizer_that_steps_at_the_rate_that_is_set_is_let_in(changes, dtype):
    assert len(list(enter(**changes, dtype=dtype).run(Order(4096, 0), 0, 64, 8))) == 8


# Losses whose samples depend on one another


def of_a_mean(model, batch):
    return losses(model, batch) / len(batch[0])


def noisy(model, batch, losses=losses):
    return losses(model, (F.dropout(batch[0] + torch.randn_like(batch[0]), 0.5), batch[1]))


class Texts:
    """Rows of other lengths, padded to the longest of a batch."""

    def __len__(self):
        return 64

    def batch(self, indices):
        rows = [torch.full((1 + i % 7 * (i > 32),), 1.0 + i) for i in indices.tolist()]
        return nn.utils.rnn.pad_sequence(rows, batch_first=True)


class Text(nn.Module):
    """Each token alone, with dropout."""

    def __init__(self):
        super().__init__()
        self.head = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))

    def forward(self, x):
        return (self.head(x[..., None])[..., 0] * (x > 0)).sum(1)


TEXTS = {
    "make_model": Text,
    "train": Texts(),
    "valid": Texts(),
    "per_sample_loss": lambda model, batch: model(batch).square(),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("changes", "dependent"),
    [
        ({"per_sample_loss": centered}, True),
        ({"per_sample_loss": of_a_mean}, True),
        ({"make_model": with_norm, "batch_size": 2}, True),
        ({"per_sample_loss": lambda model, batch: noisy(model, batch, centered)}, True),
        ({}, False),
        (TEXTS, False),
        ({"per_sample_loss": noisy}, False),
    ],
)
def test_losses_alone_and_in_company(changes, dependent, dtype):
    assert enter(**{"batch_size": 8, **changes}, dtype=dtype).dependent is dependent


def test_dependent_batches_are_not_cut():
    """Neither where the task says so nor where they do not fit."""

    def hungry(model, batch):
        if len(batch[0]) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return centered(model, batch)

    with pytest.raises(InputError, match="micro_batch_size = 4"):
        enter(per_sample_loss=centered, batch_size=8, micro_batch_size=4)
    trainer = enter(per_sample_loss=hungry, batch_size=8)
    trainer.fit_micro_batch(16)
    with pytest.raises(InputError, match="micro_batch_size = 16"):
        trainer.fit_micro_batch(32)


@pytest.mark.slow
def test_a_study_of_dependent_losses_measures_no_noise_scale_and_says_so(tmp_path):
    """Its record knows it, so that a resumed study goes on alike."""
    begin(tmp_path / "run", "dependent", at=1500)
    found = go_on(tmp_path / "run")[0].summary
    run = read_run(tmp_path / "run")
    assert run.header.task.dependent
    assert not run.results.select(Noise)
    assert found.remarks[-1] == DEPENDENT
    assert len(found.remarks) <= 3
    assert found.noise == ()
