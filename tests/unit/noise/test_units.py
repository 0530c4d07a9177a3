"""What counts as a sample: groups of rollouts with one baseline, adapters beside frozen weights."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from steadygrad.noise import NoiseScale

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

    def loss(weights, x, actions, advantages):
        def call(inputs):
            return functional_call(policy, weights, (inputs,))

        return loss_of(call, x[None], actions[None], advantages[None])

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


@pytest.mark.slow
def test_groups_of_rollouts_are_samples_while_they_stay_together():
    policy, right = make_policy()
    truth = true_noise_scale(policy, rollouts(policy, right, 20_000))
    whole = measured(policy, right, lambda i, *batch: [part[i::PARTS] for part in batch])
    assert float(whole.low) < truth < float(whole.high)
    assert float(whole.high) < 1.2 * truth
    # One rollout of every prompt in each micro-batch: parts that share their prompts hide what
    # prompts differ in, and the group's mean ties them together.
    apart = measured(policy, right, lambda i, x, a, r: (x.clone(), a[:, [i]], r[:, [i]]))
    assert float(apart.high) < truth / 5
    # Normalised over the whole batch, samples depend on one another a little, and it shows little.
    white = measured(policy, right, whitened)
    assert float(white.low) < truth < float(white.high)


def whitened(part, x, actions, advantages):
    advantages = (advantages - advantages.mean()) / advantages.std()
    return [each[part::PARTS] for each in (x, actions, advantages)]


class LoRA(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Parameter(torch.randn(2, base.in_features))
        self.lora_B = nn.Parameter(torch.randn(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def test_adapters_are_measured_and_frozen_weights_are_not():
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(6, 5)), nn.Tanh(), LoRA(nn.Linear(5, 1))).double()
    noise = NoiseScale(model, samples=3, groups=lambda name: name.rpartition(".")[2])
    x = torch.randn(4, 3, 6, dtype=torch.float64)
    adapters = [p for p in model.parameters() if p.requires_grad]
    gradients = []
    for part in x:
        loss = model(part).square().mean()
        parts = torch.autograd.grad(loss, adapters, retain_graph=True)
        gradients.append(torch.cat([g.flatten() for g in parts]))
        (loss / 4).backward()
    noise.step()
    stacked = torch.stack(gradients)
    trace = 3 * stacked.var(0).sum()
    signal = stacked.mean(0).square().sum() - trace / 12
    estimate = noise.estimate()
    assert len(adapters) == 4
    assert set(estimate.by_group) == {"lora_A", "lora_B"}
    assert float(estimate.noise_trace) == pytest.approx(float(trace), rel=1e-10)
    assert float(estimate.grad_sq_norm) == pytest.approx(float(signal), rel=1e-10)
    assert int(noise.altered) == 0
