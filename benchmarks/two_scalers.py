"""Optimizer steps taken where each of two or three networks has a scaler, beside torch's.

The losses of a generator and of an actor go through the critic, and so through another scaler's
boundaries. Small networks on made-up data, under autocast to float16; a skipped step is not taken.

Run: python benchmarks/two_scalers.py [--seeds 200] [--steps 40] [--save]
"""

import argparse
import copy
import datetime
from collections.abc import Callable
from typing import Any

import torch
from side_by_side import hardware, save
from torch import Tensor, nn

from steadygrad.scale import LayerwiseGradScaler

STATES, ACTIONS, BATCH = 4, 2, 16
Make = Callable[[nn.Module], Any]
SCALERS: dict[str, Make | None] = {
    "none": None,
    "torch": lambda net: torch.amp.GradScaler("cpu"),
    "auto": LayerwiseGradScaler,
    "by hand": lambda net: LayerwiseGradScaler(net, {"0": 2.0**6, "4": 4.0}, init_scale=2.0**4),
}


def mlp(inputs: int, outputs: int, width: int = 32) -> nn.Sequential:
    hidden = [nn.Linear(inputs, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*hidden, nn.Linear(width, outputs))


class Loop:
    """Networks, each with an optimizer and a scaler; `taken` counts the optimizers' steps.

    `spoilt` is the network whose loss overflows in step `bad`.
    """

    policy = "actor"
    every = 1

    def __init__(self, scaler: str, half: bool = True, spoilt: str = "", bad: int = 5) -> None:
        self.nets, self.half, self.spoilt, self.bad = self.make(), half, spoilt, bad
        self.targets = {name: copy.deepcopy(net) for name, net in self.nets.items()}
        make = SCALERS[scaler]
        self.scalers = {name: make(net) for name, net in self.nets.items()} if make else {}
        self.taken, self.optimizers = dict.fromkeys(self.nets, 0), {}
        for name, net in self.nets.items():
            self.optimizers[name] = torch.optim.Adam(net.parameters(), 1e-3)
            self.optimizers[name].register_step_post_hook(lambda *_, name=name: self.count(name))

    def make(self) -> dict[str, nn.Module]:
        critics = {"critic": mlp(STATES + ACTIONS, 1), "twin": mlp(STATES + ACTIONS, 1)}
        return {"actor": mlp(STATES, ACTIONS), **critics}

    def critics(self) -> list[str]:
        return [name for name in self.nets if name != self.policy]

    def count(self, name: str) -> None:
        self.taken[name] += 1

    def run(self, steps: int) -> "Loop":
        for step in range(steps):
            data = [torch.randn(BATCH, n) for n in (STATES, ACTIONS, STATES)]
            self.update(step, self.critic_losses, data)
            if step % self.every == 0:
                self.update(step, self.policy_losses, data)
        return self

    def update(self, step: int, losses: Callable[..., dict[str, Tensor]], data: Any) -> None:
        with torch.autocast("cpu", torch.float16, enabled=self.half):
            made = losses(*data)
        for name, loss in made.items():
            optimizer, scaler = self.optimizers[name], self.scalers.get(name)
            optimizer.zero_grad()
            loss = loss * torch.inf if (name, step) == (self.spoilt, self.bad) else loss
            if scaler is None:
                loss.backward()
                if loss.isfinite():
                    optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        with torch.no_grad():
            for target, net in zip(self.targets.values(), self.nets.values(), strict=True):
                for old, new in zip(target.parameters(), net.parameters(), strict=True):
                    old.lerp_(new, 0.05)

    def value(self, name: str, state: Tensor, action: Tensor, target: bool = False) -> Tensor:
        net = (self.targets if target else self.nets)[name]
        return net(torch.cat([state, action], -1)).float().squeeze(-1)

    def wanted(self, state: Tensor, action: Tensor, after: Tensor) -> Tensor:
        """The critics' target: a made-up reward, and the targets' least value of what follows."""
        following = self.next_action(after)
        values = [self.value(name, after, following, target=True) for name in self.critics()]
        return (state[:, :ACTIONS] * action).sum(-1) + 0.9 * torch.stack(values).amin(0)

    def next_action(self, after: Tensor) -> Tensor:
        return self.targets["actor"](after).float().tanh()

    def critic_losses(self, state: Tensor, action: Tensor, after: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            wanted = self.wanted(state, action, after)
        values = {name: self.value(name, state, action) for name in self.critics()}
        return {name: (value - wanted).square().mean() for name, value in values.items()}

    def policy_losses(self, state: Tensor, action: Tensor, after: Tensor) -> dict[str, Tensor]:
        action = self.nets["actor"](state).float().tanh()
        return {"actor": -self.value("critic", state, action).mean()}


class DDPG(Loop):
    """One critic."""

    def make(self) -> dict[str, nn.Module]:
        return {"actor": mlp(STATES, ACTIONS), "critic": mlp(STATES + ACTIONS, 1)}


class TD3(Loop):
    """Two critics, noise on the targets' actions, and an actor that moves every other step."""

    every = 2

    def next_action(self, after: Tensor) -> Tensor:
        action = super().next_action(after)
        return (action + 0.2 * torch.randn_like(action).clamp(-0.5, 0.5)).clamp(-1, 1)


class SAC(Loop):
    """Two critics, and an actor that draws its actions and is paid for their entropy."""

    def make(self) -> dict[str, nn.Module]:
        return {**super().make(), "actor": mlp(STATES, 2 * ACTIONS)}

    def drawn(self, state: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_std = self.nets["actor"](state).float().chunk(2, -1)
        normal = torch.distributions.Normal(mean, log_std.clamp(-5, 2).exp())
        raw = normal.rsample()
        action = raw.tanh()
        surprise = normal.log_prob(raw) - (1 - action.square() + 1e-6).log()
        return action, surprise.sum(-1)

    def next_action(self, after: Tensor) -> Tensor:
        return self.drawn(after)[0]

    def policy_losses(self, state: Tensor, action: Tensor, after: Tensor) -> dict[str, Tensor]:
        action, surprise = self.drawn(state)
        values = [self.value(name, state, action) for name in ("critic", "twin")]
        return {"actor": (0.2 * surprise - torch.minimum(*values)).mean()}


class GAN(Loop):
    """The hinge loss."""

    policy = "generator"

    def make(self) -> dict[str, nn.Module]:
        return {"generator": mlp(ACTIONS, STATES), "critic": mlp(STATES, 1)}

    def critic_losses(self, real: Tensor, noise: Tensor, _: Tensor) -> dict[str, Tensor]:
        critic, made = self.nets["critic"], self.nets["generator"](noise).detach()
        real_loss = (1 - critic(real + 1).float()).relu().mean()
        return {"critic": real_loss + (1 + critic(made).float()).relu().mean()}

    def policy_losses(self, real: Tensor, noise: Tensor, _: Tensor) -> dict[str, Tensor]:
        made = self.nets["generator"](noise)
        return {"generator": -self.nets["critic"](made).float().mean()}


LOOPS: dict[str, type[Loop]] = {"GAN": GAN, "SAC": SAC, "TD3": TD3, "DDPG": DDPG}


def row(name: str, scaler: str, seeds: int, steps: int) -> str:
    """One line of the table: each network's mean, and the seed with the fewest."""
    taken: dict[str, list[int]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        for net, count in LOOPS[name](scaler).run(steps).taken.items():
            taken.setdefault(net, []).append(count)
    cells = [f"{n} {sum(c) / seeds:.2f} ({min(c)})" for n, c in sorted(taken.items())]
    return f"| {name} | {scaler} | {', '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    date = datetime.date.today().isoformat()
    lines = [
        f"# Steps taken with a scaler for each network, {date}",
        f"\n{hardware()}.\n\nOf {args.steps}, mean of {args.seeds} seeds (the fewest of any seed).",
        "TD3's actor has every other step.\n\n| loop | scaler | steps taken |\n| --- | --- | --- |",
    ]
    for name in LOOPS:
        lines += [
            row(name, scaler, args.seeds, args.steps) for scaler in SCALERS if scaler != "none"
        ]
    print("\n".join(lines))
    if args.save:
        print(save("two-scalers-cpu", "\n".join(lines) + "\n", date))


if __name__ == "__main__":
    main()
