"""Torch's tests of a step of its own optimizers, on a CPU: after its OptimizerInfo tests.

Groups of those that do not apply: sparse gradients, complex parameters and `differentiable`, which
are refused here; LBFGS (a closure is never required); several CUDA devices and the peak of CUDA
memory, which `tests/gpu` has; lists of which flags an optimizer supports, as all modes are one
table here. Left to other files: steps without gradients, `maximize`, the modes of narrow types and
the search for infinities by a scaler (`test_steps`, `test_modes`, `test_guards`).
"""

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

from tests.contracts.problems import (
    assert_rounded_alike,
    assert_same,
    parameters,
    run,
    snapshot,
    tensors_of,
)
from tests.contracts.table import OPTIMIZERS, TABLE
from tests.covering import covering

every_optimizer = pytest.mark.parametrize("entry", OPTIMIZERS.values(), ids=OPTIMIZERS)
every_optimizer_and_mode = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)

SCHEDULES = {
    "none": (),
    "step": (lambda o: lr_scheduler.StepLR(o, step_size=10, gamma=0.9),),
    "plateau": (lambda o: lr_scheduler.ReduceLROnPlateau(o, threshold=1.0, patience=2),),
    "warm-up and plateau": (
        lambda o: lr_scheduler.LinearLR(o, start_factor=0.4, total_iters=4),
        lambda o: lr_scheduler.ReduceLROnPlateau(o, threshold=1.0, patience=2),
    ),
    "two that multiply": (
        lambda o: lr_scheduler.StepLR(o, step_size=4, gamma=0.9),
        lambda o: lr_scheduler.ExponentialLR(o, gamma=0.95),
    ),
    "momentum too": (
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.03, total_steps=24, base_momentum=0.8),
    ),
}
SHARED = [
    {},
    {"lr": 0.02},
    {"lr": torch.tensor(0.02)},
    {"eps": 1e-3},
    {"maximize": True},
    {"capturable": True},
]


def cases():
    for name, entry in OPTIMIZERS.items():
        own = [some for e in OPTIMIZERS.values() if e.make is entry.make for some in e.others]
        zeros = tuple(0.0 for _ in entry.betas)
        mixed = {"lr": 0.02, "betas": zeros, "eps": 1e-3, "maximize": True}
        for options in (*SHARED, {"betas": entry.betas}, mixed, *own):
            yield pytest.param(entry, options, id=f"{name}-{options}")


class Problem:
    """A linear layer whose outputs are to vanish."""

    def __init__(self, contiguous=True, dtype=torch.float32):
        draw = torch.Generator().manual_seed(2024)
        weight = torch.randn((10, 5) if contiguous else (10, 5, 2), generator=draw)
        weight, bias = weight.to(dtype), torch.randn(10, generator=draw).to(dtype)
        self.weight = nn.Parameter(weight if contiguous else weight[..., 0])
        self.bias = nn.Parameter(bias)
        self.x = torch.randn(5, generator=draw).to(dtype)

    @property
    def params(self):
        return [self.weight, self.bias]

    def loss(self):
        return (self.weight @ self.x + self.bias).square().sum()

    def train(self, optimizer, schedules=(), steps=20):
        """Losses before each step and after the last."""

        def closure():
            optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        losses = []
        for _ in range(steps):
            loss = optimizer.step(closure).detach()
            losses.append(float(loss))
            for schedule in schedules:
                if isinstance(schedule, lr_scheduler.ReduceLROnPlateau):
                    schedule.step(loss)
                else:
                    schedule.step()
        return [*losses, float(self.loss().detach())]


@pytest.mark.few(14)
@covering(entry=TABLE, contiguous=[True, False], schedule=[*SCHEDULES])
@pytest.mark.filterwarnings("ignore:Expected a fused kernel for")
def test_schedules_go_the_right_way_with_a_rate_in_a_tensor_too(entry, contiguous, schedule):
    found = []
    for rate in (0.02, torch.tensor(0.02, dtype=torch.float64)):
        problem = Problem(contiguous)
        optimizer = entry(problem.params, lr=rate)
        schedules = [make(optimizer) for make in SCHEDULES[schedule]]
        losses = problem.train(optimizer, schedules)
        assert losses[-1] < losses[0]
        assert optimizer.skipped == 0
        (group,) = optimizer.param_groups
        assert group["lr"] is rate or not isinstance(rate, torch.Tensor)
        assert (float(group["lr"]) == 0.02) == (schedule == "none")
        found.append([*problem.params, torch.tensor(losses), torch.tensor(float(group["lr"]))])
    for number, tensor in zip(*found, strict=True):
        # Schedules compute with numbers of float64 in both.
        torch.testing.assert_close(number, tensor, rtol=1e-6, atol=1e-7)


@pytest.mark.few(14)
@every_optimizer_and_mode
# The last gives all groups one greatest rate.
@pytest.mark.parametrize("schedule", [*SCHEDULES][:-1])
def test_groups_with_rates_of_their_own_and_empty_ones(entry, schedule):
    problem, apart = Problem(), Problem()
    groups = [
        {"params": [], "lr": 0.5},
        {"params": [torch.zeros(0, requires_grad=True), problem.weight], "lr": 0.02},
        {"params": [torch.zeros(0, requires_grad=True)], "betas": entry.betas},
        {"params": [problem.bias], "lr": 0.01},
        {"params": []},
    ]
    optimizer = entry(groups)
    schedules = [make(optimizer) for make in SCHEDULES[schedule]]
    losses = problem.train(optimizer, schedules)
    assert losses[-1] < losses[0]
    same = entry([{"params": [apart.weight], "lr": 0.02}, {"params": [apart.bias], "lr": 0.01}])
    assert apart.train(same, [make(same) for make in SCHEDULES[schedule]]) == losses
    assert_same(problem.params, apart.params)
    assert optimizer.state[problem.bias]["step"] == 20
    assert optimizer.param_groups[0]["lr"] == pytest.approx(25 * optimizer.param_groups[1]["lr"])


@every_optimizer_and_mode
def test_parameters_without_elements_alone_and_among_others(entry):
    empty = [torch.zeros(0, 3, requires_grad=True), torch.zeros(2, 0, requires_grad=True)]
    alone, (full, other) = entry(empty), (torch.ones(3, requires_grad=True) for _ in range(2))
    among, without = entry([empty[0], full, empty[1]]), entry([other])
    for _ in range(3):
        for p in (*empty, full, other):
            p.grad = torch.full_like(p, 0.5)
        assert alone.step(lambda: 2.0) == 2.0
        among.step()
        without.step()
    assert_same([full.detach()], [other.detach()])
    assert not torch.equal(full, torch.ones(3))
    assert [p.shape for p in empty] == [(0, 3), (2, 0)]
    assert alone.skipped == 0
    assert {float(alone.state[p]["step"]) for p in empty} == {0.0}


@pytest.mark.parametrize("name", ["LANS", "LAMB"])
@pytest.mark.parametrize("mode", [{"fused": True}, {"foreach": True}], ids=str)
def test_weight_decay_is_that_of_the_group(name, mode):
    """Without gradients only it moves weights."""
    entry = next(e for e in OPTIMIZERS.values() if e.make.__name__ == name)
    params = [torch.ones(4, 3, requires_grad=True) for _ in range(3)]
    groups = [{"params": [p], "weight_decay": 0.0} for p in params]
    groups[1]["weight_decay"] = 0.1
    optimizer = entry(groups, lr=0.01, **mode)
    for _ in range(3):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert torch.equal(params[0], torch.ones(4, 3))
    assert torch.equal(params[2], torch.ones(4, 3))
    # The trust ratio makes the step the rate times the weights.
    torch.testing.assert_close(params[1].detach(), torch.full((4, 3), 0.99**3))


@every_optimizer_and_mode
def test_zero_gradients_move_nothing_without_a_decay(entry):
    options = {"weight_decay": 0.0} if "weight_decay" in entry([{"params": []}]).defaults else {}
    params = parameters()
    before = [p.detach().clone() for p in params]
    optimizer = entry(params, **options)
    for _ in range(5):
        for p in params:
            p.grad = torch.zeros_like(p)
        optimizer.step()
    assert_same(before, [p.detach() for p in params])
    assert all(optimizer.state[p]["step"] == 5 for p in params if p.numel())
    states = [t for name, t in tensors_of(optimizer) if name != "model_norm_threshold"]
    assert all(torch.isfinite(t).all() for t in states)


@pytest.mark.few(24)
@pytest.mark.parametrize(("entry", "options"), list(cases()))
def test_all_modes_agree_with_every_set_of_options(entry, options):
    """foreach=True equals foreach=False to the bit, fused=True but for rounding."""
    modes = {"foreach": True}, {"foreach": False}, {"fused": True}
    sets, optimizers = [parameters() for _ in modes], []
    for params, mode in zip(sets, modes, strict=True):
        optimizers.append(entry(params, **{**options, **mode}))
    for params, optimizer in zip(sets, optimizers, strict=True):
        run(optimizer, params, range(9))
    foreach, single, fused = optimizers
    assert_same(snapshot(foreach, sets[0]), snapshot(single, sets[1]))
    # One element's average may cancel, and the trust ratio keeps what is left: 300 to 600 roundings
    # of its weight, as many as between foreach=True in float32 and in float64.
    assert_rounded_alike(fused, foreach, roundings=1024)
    assert not torch.equal(sets[0][0], parameters()[0])


@every_optimizer
def test_fused_on_meta_goes_by_calls_and_says_so(entry, monkeypatch):
    from steadygrad.optim import loops

    monkeypatch.setattr(loops, "_WARNED", set())
    p = torch.empty(4, 3, device="meta", requires_grad=True)
    optimizer = entry([p], fused=True)
    p.grad = torch.empty_like(p)
    with pytest.warns(UserWarning, match=r"none for meta devices.*Multi-tensor calls"):
        optimizer.step()
    assert optimizer.state[p]["step"].is_meta


@pytest.mark.few(14)
@every_optimizer_and_mode
@pytest.mark.parametrize("cast", [None, torch.bfloat16], ids=str)
def test_a_scaler_with_autocast_and_a_schedule(entry, cast):
    """The same losses, rates and weights as without, as powers of two scale exactly."""
    found = []
    for enabled in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 1))
        optimizer = entry(model.parameters(), lr=0.02)
        schedule = lr_scheduler.ExponentialLR(optimizer, 0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=128.0, growth_interval=3, enabled=enabled)
        losses = []
        for step in range(8):
            x = torch.randn(6, 5, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad(set_to_none=step % 2 == 0)
            with torch.autocast("cpu", cast or torch.bfloat16, enabled=cast is not None):
                loss = (model(x).float() - 1).square().mean()
            scaler.scale(loss).backward()
            if step == 3:
                scaler.unscale_(optimizer)  # as for clipping in between
            scaler.step(optimizer)
            scaler.update()
            schedule.step()
            losses.append(loss.detach())
        assert losses[-1] < losses[0]
        assert optimizer.skipped == 0
        found.append([*(p.detach() for p in model.parameters()), torch.stack(losses)])
    assert_same(*found)
