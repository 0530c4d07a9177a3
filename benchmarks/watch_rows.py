"""Whether a gradient watch names the right module and row: faults planted at random.

Random nets (layers, norms, gates, residual blocks, attention, folded batches), losses and batch
sizes. In a random module a random row of the output becomes NaN or overflows, or the row's gradient
does on the way back. A row is defined where that output has the batch's rows, and nothing on the
way mixes them; of a gradient, where hooks see it: in the first pass, or after a fault.

Run: python benchmarks/watch_rows.py [--cases 10000] [--seed 0] [--save]
"""

import argparse
import collections
import datetime
import random

import torch
import torch.nn.functional as F
from side_by_side import hardware, save
from torch import nn

from steadygrad.watch import GradientWatch

WIDTH = 8
LOSSES = {
    "mse": lambda y, t, keep: F.mse_loss(y, t),
    "l1": lambda y, t, keep: F.l1_loss(y, t),
    "hinge": lambda y, t, keep: (1 - y * t.sign()).relu().mean(),
    "clamp": lambda y, t, keep: (y.clamp(-1, 1) - t).square().mean(),
    "nan_to_num": lambda y, t, keep: (y.nan_to_num(0, 0, 0) - t).square().mean(),
    "rows left out": lambda y, t, keep: F.mse_loss(y[keep], t[keep]),
}


class Residual(nn.Module):
    """A sum with its input."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


class Attention(nn.Module):
    """Attends over the positions of each row."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v))


class Folded(nn.Module):
    """Puts rows and positions into one dimension, as routers and losses do."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x.flatten(0, 1)).view_as(x)


class Gate(nn.Module):
    """A layer without weights."""

    def forward(self, x):
        return x * torch.sigmoid(x)


class Planted(torch.autograd.Function):
    """Identity, whose backward pass breaks a row."""

    @staticmethod
    def forward(ctx, x, row):
        ctx.row = row
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        gradient[ctx.row] = torch.nan
        return gradient, None


class Place(nn.Module):
    """Where a gradient breaks on the way back."""

    row = None

    def forward(self, x):
        return x * 1.0 if self.row is None else Planted.apply(x, self.row)


def layer(draw, depth=0):
    kind = draw.choice(["linear", "norm", "gate", "tanh", "residual", "attention", "folded"])
    if depth > 1 and kind in ("residual", "folded"):
        kind = "linear"
    if kind in ("residual", "folded"):
        inner = nn.Sequential(*(layer(draw, depth + 1) for _ in range(draw.randint(1, 3))))
        if kind == "folded":
            # Attention over rows would mix them.
            bare = nn.Sequential(nn.Linear(WIDTH, WIDTH), draw.choice([nn.Tanh(), Gate()]))
            return Folded(bare)
        return Residual(inner)
    return {
        "linear": lambda: nn.Linear(WIDTH, WIDTH),
        "norm": lambda: nn.LayerNorm(WIDTH),
        "gate": Gate,
        "tanh": nn.Tanh,
        "attention": Attention,
    }[kind]()


def bad(output, row, value):
    output = output.clone()
    output[row] = output[row] + value
    return output


def case(seed):
    """What was planted, and what was found."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    rows, positions = draw.randint(2, 12), draw.choice([3, 5])
    model = nn.Sequential(
        nn.Linear(4, WIDTH), *(layer(draw) for _ in range(draw.randint(1, 5))), Place(),
        nn.Linear(WIDTH, WIDTH), *(layer(draw) for _ in range(draw.randint(0, 2))),
        nn.Linear(WIDTH, 3),
    )  # fmt: skip
    names = [name for name, m in model.named_modules() if name and not list(m.children())]
    back = draw.random() < 0.25
    at = next(n for n, m in model.named_modules() if isinstance(m, Place))
    name = at if back else draw.choice(names)
    row = draw.randrange(rows)
    value = draw.choice([torch.nan, torch.inf, -torch.inf])
    armed = []

    def spoil(module, args, output):
        # A folded batch has another row there.
        place = row * (len(output) // rows)
        return bad(output, place, value) if armed else output

    if not back:
        model.get_submodule(name).register_forward_hook(spoil)
    watch = GradientWatch(model)
    watch.shared.deferred = draw.random() < 0.3
    loss = LOSSES[draw.choice([*LOSSES])] if not back else LOSSES["mse"]
    keep = [i for i in range(rows) if i != row] if draw.random() < 0.5 else [*range(rows)]
    healthy = draw.randint(0, 2)
    for step in range(healthy + 1):
        model.zero_grad()
        if step == healthy:
            armed.append(True)
            model.get_submodule(at).row = row if back else None
        x, t = torch.randn(rows, positions, 4), torch.randn(rows, positions, 3)
        loss(model(x), t, keep).backward()
    broken = any(not p.grad.isfinite().all() for p in model.parameters())
    folded = any(
        isinstance(m, Folded) and name.startswith(f"{n}.") for n, m in model.named_modules()
    )
    kind = "gradient" if back else "output"
    # In a later pass the gradient before the place may be known by a weight's gradient only.
    told = not (folded or (back and healthy))
    return broken, (kind, name, healthy, row), told, watch.report()


def judge(broken, planted, told, found):
    kind, name, batch, row = planted
    if not broken:
        return "no gradient broke" if found is None else "false alarm"
    if found is None or (found.kind, found.batch) != (kind, batch):
        return "wrong"
    if found.name != name:
        around = kind == "gradient" and batch and (not found.name or name.startswith(found.name))
        return "module around it" if around and found.row in (None, row) else "wrong module"
    if found.row == row:
        return "right"
    return "wrong row" if told or found.row is not None else "right module, row undefined"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    counts, wrong = collections.Counter(), []
    for seed in range(args.seed, args.seed + args.cases):
        broken, planted, told, found = case(seed)
        verdict = judge(broken, planted, told, found)
        counts[verdict] += 1
        if "wrong" in verdict or verdict == "false alarm":
            wrong.append(f"seed {seed}: {verdict}: {planted}, {found}")
    date = datetime.date.today().isoformat()
    lines = [f"# Gradient watch: faults planted in random rows, {date}", f"{hardware()}.", ""]
    lines += [
        f"{args.cases} cases from seed {args.seed}.",
        "",
        "| verdict | cases |",
        "| --- | --- |",
    ]
    lines += [f"| {verdict} | {count} |" for verdict, count in counts.most_common()]
    report = "\n".join(lines) + "\n"
    print(report, *wrong[:20], sep="\n")
    if args.save:
        print(save("watch-rows-cpu", report, date))


if __name__ == "__main__":
    main()
