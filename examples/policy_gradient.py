"""A policy gradient with groups of rollouts (GRPO): its noise in prompts, float16, and a watch.

The policy answers a prompt, 8 numbers, with up to 6 tokens; token 0 ends the answer. The advantage
of a rollout is its reward less the mean of its group, and the loss a mean over all tokens.
"""

import torch
from torch import Tensor, nn

from steadygrad import NoiseScale
from steadygrad.optim import LANS
from steadygrad.scale import LayerwiseGradScaler
from steadygrad.watch import GradientWatch, check_accumulation

PROMPTS, GROUP, TOKENS, WORDS, MICRO_BATCHES = 16, 4, 6, 5, 4
torch.manual_seed(0)
ANSWERS = torch.randn(8, TOKENS * WORDS)
Rollouts = dict[str, Tensor]


def log_probabilities(policy: nn.Module, prompts: Tensor) -> Tensor:
    """Of every word at every place, with shape (prompts, 1, tokens, words)."""
    return policy(prompts).float().unflatten(1, (1, TOKENS, WORDS)).log_softmax(-1)


@torch.no_grad()
def sample(policy: nn.Module, count: int) -> Rollouts:
    """New prompts, a group of rollouts for each, which of their tokens count, and advantages."""
    prompts = torch.randn(count, 8)
    words = log_probabilities(policy, prompts).exp().flatten(0, 2)
    tokens = words.multinomial(GROUP, replacement=True).unflatten(0, (count, TOKENS)).mT
    ended = (tokens == 0).cumsum(-1) - (tokens == 0).long() > 0
    right = (prompts @ ANSWERS).unflatten(1, (1, TOKENS, WORDS)).argmax(-1)
    reward = ((tokens == right) & ~ended).sum(-1, keepdim=True) / TOKENS
    advantage = reward - reward.mean(1, keepdim=True)
    return {"x": prompts, "tokens": tokens, "mask": ~ended, "advantage": advantage, "r": reward}


def loss_fn(policy: nn.Module, batch: Rollouts) -> Tensor:
    """The mean over all tokens of a batch."""
    return summed(policy, batch) / batch["mask"].sum()


def summed(policy: nn.Module, batch: Rollouts) -> Tensor:
    words = log_probabilities(policy, batch["x"]).expand(-1, GROUP, -1, -1)
    chosen = words.gather(-1, batch["tokens"].unsqueeze(-1)).squeeze(-1)
    return -(chosen * batch["advantage"] * batch["mask"]).sum()


def cut(batch: Rollouts) -> list[Rollouts]:
    """Micro-batches of whole groups: rollouts of one prompt share its advantage's mean."""
    parts = {name: value.chunk(MICRO_BATCHES) for name, value in batch.items()}
    return [{name: part[i] for name, part in parts.items()} for i in range(MICRO_BATCHES)]


def main(steps: int = 120) -> None:
    """Trains the policy in float16."""
    policy = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, TOKENS * WORDS))
    optimizer = LANS(policy.parameters(), lr=2e-2)
    scaler = LayerwiseGradScaler(policy, {"0": 2.0**8, "2": 2.0**8})
    noise = NoiseScale(policy, scaler=scaler)
    watch = GradientWatch(policy)
    for step in range(1, steps + 1):
        batch = sample(policy, PROMPTS)
        total = batch["mask"].sum()
        for micro in cut(batch):
            # The unit is the prompt. A micro-batch weighs as its tokens do in the loss.
            noise.samples(len(micro["x"]), weight=micro["mask"].sum() / total)
            with torch.autocast("cpu", torch.float16):
                loss = summed(policy, micro) / total
            scaler.scale(loss).backward()
        noise.step()  # before unscaling and clipping
        scaler.unscale_(optimizer)
        if not nn.utils.clip_grad_norm_(policy.parameters(), 1.0).isfinite():
            print(watch.report())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 40 == 0:
            found = noise.estimate()
            print(
                f"step {step}  reward {batch['r'].mean():.2f}  noise scale {found.value:.0f} "
                f"[{found.low:.0f}, {found.high:.0f}] prompts of {GROUP} rollouts"
            )
    watch.close()

    def mean_of_means(micro_batches: list[Rollouts]) -> None:
        for micro in micro_batches:
            (loss_fn(policy, micro) / len(micro_batches)).backward()

    batch = sample(policy, PROMPTS)
    print(check_accumulation(policy, loss_fn, batch, accumulate=mean_of_means, micro_batches=4))


if __name__ == "__main__":
    main()
