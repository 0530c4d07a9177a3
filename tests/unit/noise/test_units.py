"""What counts as a sample: groups of rollouts with one baseline, adapters beside frozen weights."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from steadygrad.noise import NoiseScale
from tests.unit.noise.training_loop import (
    COUNTS,
    assert_defined,
    left_out,
    make,
    measure,
    per_sample,
)

GROUP, PROMPTS, PARTS, STEPS = 4, 16, 4, 1500


def make_policy():
    torch.manual_seed(0)
    policy = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    right = torch.randn(8, 4)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.3)
    for _ in range(60):
        optimizer.zero_grad()
        loss_of(policy, *rollouts(policy, right, 64)).backward()
        optimizer.step()
    policy.zero_grad()
    return policy, right


def rollouts(policy, right, prompts):
    """Prompts, a group of actions for each, and rewards less their group's mean."""
    x = torch.randn(prompts, 8)
    with torch.no_grad():
        actions = policy(x).softmax(-1).multinomial(GROUP, replacement=True)
    rewards = (actions == (x @ right).argmax(1, keepdim=True)).float()
    rewards += 0.3 * torch.randn(prompts, GROUP)
    return x, actions, rewards - rewards.mean(1, keepdim=True)


def loss_of(policy, x, actions, advantages):
    return -(policy(x).log_softmax(-1).gather(1, actions) * advantages).mean()


def true_noise_scale(policy, batch):
    """In prompts, from every group's own gradient."""
    names = {name: p.detach() for name, p in policy.named_parameters()}

    def loss(weights, *sample):
        def call(inputs):
            return functional_call(policy, weights, (inputs,))

        return loss_of(call, *(part[None] for part in sample))

    parts = vmap(grad(loss), in_dims=(None, 0, 0, 0))(names, *batch)
    gradients = torch.cat([part.flatten(1) for part in parts.values()], 1)
    trace = gradients.var(0).sum()
    return float(trace / (gradients.mean(0).square().sum() - trace / len(gradients)))


def measured(policy, right, cut):
    noise = NoiseScale(policy, samples=PROMPTS // PARTS, decay=1.0, drift=False)
    for _ in range(STEPS):
        batch = rollouts(policy, right, PROMPTS)
        for part in range(PARTS):
            (loss_of(policy, *cut(part, *batch)) / PARTS).backward()
        noise.step()
        policy.zero_grad()
    noise.remove()
    return noise.estimate()


def whole(part, *batch):
    return [each[part::PARTS] for each in batch]


def apart(part, x, actions, advantages):
    """One rollout of every prompt: parts share their prompts, and hide what these differ in."""
    return x.clone(), actions[:, [part]], advantages[:, [part]]


def whitened(part, x, actions, advantages):
    """Normalised over the whole batch: samples depend on one another, and it shows little."""
    return whole(part, x, actions, (advantages - advantages.mean()) / advantages.std())


@pytest.mark.slow
def test_groups_of_rollouts_are_samples_while_they_stay_together():
    policy, right = make_policy()
    truth = true_noise_scale(policy, rollouts(policy, right, 20_000))
    got = measured(policy, right, whole)
    assert float(got.low) < truth < float(got.high) < 1.2 * truth
    assert float(measured(policy, right, apart).high) < truth / 5
    white = measured(policy, right, whitened)
    assert float(white.low) < truth < float(white.high)


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 2))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def test_adapters_are_measured_and_frozen_weights_are_not():
    """By groups, which add up to the whole; an unused parameter counts as nothing."""
    layers = LoRA(nn.Linear(3, 4)), nn.Tanh(), LoRA(nn.Linear(4, 2))
    model, x, y = make(model=lambda: nn.Sequential(*layers))
    noise = NoiseScale(model, groups=lambda name: name.rpartition(".")[2])
    measure(noise, model, x, y)
    whole = noise.estimate()
    assert set(whole.by_group) == {"lora_A", "lora_B", "unused"}
    assert whole.by_group.pop("unused").noise_trace == 0
    for group, estimate in [("lora", whole), *whole.by_group.items()]:
        rows = per_sample(model, x, y, wanted=lambda name, group=group: group in name)
        assert_defined(estimate, rows, COUNTS, rel=1e-10)
    assert left_out(noise) == (0, 0)
