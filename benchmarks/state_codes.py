"""Eight-bit codes of Adam's moments: bias, stall, noise, the worst step, and rows seen seldom.

Every code of `eight_bits.py` meets the gradients that float32 meets: drawn ones, and those of two
built-in tasks. The step takes the moments before they are coded.

Run: python benchmarks/state_codes.py [--steps 2400] [--save]
"""

import argparse
import datetime
from functools import partial

import numpy as np
import torch
from eight_bits import CODES, DRAWS, GUARDS, NARROW, WIDE, F, Moments, U, exact, sloped
from side_by_side import hardware, save

from steadygrad.tasks import load_task

ELEMENTS = 4096  # of a world; whole blocks of every code
FLOAT32 = (exact, exact)
SEEDS, ROWS, WIDTH, CLASSES, BATCH = 5, 128, 64, 16, 32
TEXT = """The second moment's code, then the first one's: E and M are bits of exponent and mantissa,
s a sign, blocks of 64 where nothing else is said. Published: bitsandbytes' and torchao's trees,
torchao's float8, FlashOptim's companding, and Li et al.'s linear code at eight bits. They have no
guards; ours have the floor (the smallest code of the block) and the bound (Cauchy-Schwarz)."""
OF_CODES = """Largest |E[q(x)] / x - 1| down to so many binades below the block's largest number, by
1,024 random numbers; stall: the second moment of elements whose gradients vanished while others'
went on, over beta2^steps; mean and deviation of a few runs."""
OF_MOMENTS = """Cells: standard deviation of sqrt(v / exact) and its 5 and 95 %; second moments that
are coded as zero; the error of m over its root mean square, median and 95 % of elements."""
OF_STEPS = """Cells: error of all steps over their root mean square; 1 and 99.9 % of an element's
step over float32's, where that is at least a tenth of the typical one; largest step over float32's.
Log-normal: sizes with sigma 1.5. Sparse: every second element once in 100 steps, some stop. Jumps:
after half of the run an eighth of the elements has 1,000 times the gradient, another 1/1,000."""
OF_DRAWS = f"""{WIDE}, gradients that repeat. Cells: v over exact at beta2 0.95 and 0.999; what of
m's error lasts, over m. Start, slope: both are hashes of the step; start alone: the slope is fixed;
hash: of each element. Correlation: of v's and m's rounding. Stall as above, at 0.95 and 0.999."""
OF_ROWS = """Final excess loss over float32's of five embeddings of 128 rows, by dense Adam (beta2
0.999): mean, least and largest. Rare: rows by Zipf's law. Gated: half of the rows are silent for
half of the run, then have new classes; their loss."""


def table(head, rows):
    lines = [" | ".join(map(str, row)) for row in (head, ["---"] * len(head), *rows)]
    return "\n".join(f"| {line} |" for line in lines)


def guard_of(name):
    return "none" if name.startswith("published") else "both"


def dot(a, b):
    return float(a.astype(float) @ b)


def bias(code, binades):
    """Largest relative bias of numbers down to so many binades below the largest."""
    x = 2.0 ** -np.linspace(0, binades, 16 * (code.block - 1)).reshape(16, -1)
    x = np.c_[np.ones(16), x].astype(F).ravel() * F(1.3)
    draws = (np.arange(1024) + 0.5) * 2.0 ** (23 - code.mantissa) / 1024
    mean = np.mean([code(x, np.full(len(x), r, U))[0].astype(float) for r in draws], axis=0)
    return f"{abs(mean / x - 1).max():.0e}"


def stall(codes, beta2, steps, draw=sloped, runs=4):
    """Second moment of elements whose gradients vanished, over what it should be."""
    gone, found = np.arange(ELEMENTS) % 2 == 0, []
    for run in range(runs):
        state = Moments(codes, ELEMENTS, beta2, lambda t, i, run=run: draw(t + run * 10**6, i))
        rng, state.v[:] = np.random.default_rng(run), 1
        for _ in range(steps):
            state.add(np.where(gone, 0, rng.standard_normal(ELEMENTS)).astype(F))
        found.append(state.v[gone].mean(dtype=float) / beta2**steps)
    return f"{np.mean(found):.3g} +- {np.std(found):.2g}"


def of_codes():
    rows = []
    for name, pair in CODES.items():
        wide = [bias(code, n) for code, n in zip(pair * 2, (12, 6, 20, 12), strict=True)]
        rows.append([name, *wide, stall(pair, 0.95, 100), stall(pair, 0.999, 5000, runs=2)])
    head = ["code", "v, 12 binades", "m, 6", "v, 20", "m, 12", "stall, 0.95, 100 steps"]
    return [OF_CODES, table([*head, "0.999, 5,000"], rows)]


def trained(name, parameter):
    """Gradients of one weight of a task while AdamW trains it."""
    torch.manual_seed(0)
    task = load_task(name)
    model = task.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), task.lr)
    weight = model.get_parameter(parameter)

    def gradient(t):
        batch = task.train.batch(torch.randint(len(task.train), (task.batch_size,)))
        optimizer.zero_grad()
        task.per_sample_loss(model, batch).mean().backward()
        optimizer.step()
        return weight.grad.flatten()[:ELEMENTS].numpy()

    return gradient


def worlds(steps):
    """How many steps, and the gradients of a step."""
    rng, role = np.random.default_rng(1), np.arange(ELEMENTS) % 8
    sizes = np.exp(1.5 * rng.standard_normal(ELEMENTS))
    normal = partial(rng.standard_normal, ELEMENTS)

    def sparse(t):
        often, early = (role < 4) | (rng.random(ELEMENTS) < 0.01), (role == 7) & (3 * t < steps)
        return normal() * sizes * (often & (role < 7) | early)

    def jumps(t):
        return normal() * np.choose((2 * t > steps) * np.minimum(role + 1, 3), (1, 1e3, 1e-3, 1))

    return {
        "equal": (steps, lambda t: normal()),
        "log-normal": (steps, lambda t: normal() * sizes),
        "sparse": (steps, sparse),
        "jumps": (steps, jumps),
        "t(2)": (steps, lambda t: rng.standard_t(2, ELEMENTS)),
        "autoencoder": (steps // 4, trained("digits-autoencoder", "0.weight")),
        "char-lm": (steps // 6, trained("char-lm", "blocks.0.mlp_out.weight")),
    }


def measure(steps, gradient, beta2):
    """Cells of one world: moments of each code, and steps of each code and guard."""
    coded = {name: Moments(pair, ELEMENTS, beta2) for name, pair in CODES.items()}
    guards = {name: GUARDS if name in (NARROW, WIDE) else [guard_of(name)] for name in CODES}
    kinds = [(name, guard) for name in CODES for guard in guards[name]]
    worst, error, ratios = (
        dict.fromkeys(kinds, 0.0),
        dict.fromkeys(kinds, 0.0),
        {k: [] for k in kinds},
    )
    wrong, roots = dict.fromkeys(CODES, 0.0), {name: [] for name in CODES}
    truth, size, total, most, typical = Moments(FLOAT32, ELEMENTS, beta2), 0.0, 0.0, 0.0, 0.1
    for t in range(1, steps + 1):
        g = gradient(t).astype(F)
        aim = truth.step(*truth.add(g), "none")
        total, most = total + dot(aim, aim), max(most, abs(aim).max())
        typical += (np.sqrt(np.mean(aim**2)) - typical) / min(t, 100)
        large, late = abs(aim) > 0.1 * typical, 2 * t > steps and t % 20 == 0
        fresh = {name: moments.add(g) for name, moments in coded.items()}
        for name, guard in kinds:
            step = coded[name].step(*fresh[name], guard)
            worst[name, guard] = max(worst[name, guard], abs(step).max())
            error[name, guard] += dot(step - aim, step - aim)
            if t % 20 == 0:
                ratios[name, guard].append(abs(step[large] / aim[large]))
        if late:
            size, seen = size + truth.m.astype(float) ** 2, truth.v > 0
            for name, moments in coded.items():
                roots[name].append(np.sqrt(moments.v[seen] / truth.v[seen]))
                wrong[name] = wrong[name] + (moments.m - truth.m).astype(float) ** 2
    cells = {}
    for name in CODES:
        r, m = np.concatenate(roots[name]), np.sqrt(wrong[name][size > 0] / size[size > 0])
        (low, high), (middle, large) = np.percentile(r, (5, 95)), np.percentile(m, (50, 95))
        spread = f"{r.std():.3f}, {low:.2f}-{high:.2f}, {(r == 0).mean():.1%}"
        cells[name] = f"{spread}, {middle:.0%}-{large:.0%}"
    for kind in kinds:
        low, high = np.percentile(np.concatenate(ratios[kind]), (1, 99.9))
        part = (error[kind] / total) ** 0.5
        cells[kind] = f"{part:.2g}, {low:.2f}-{high:.3g}, {worst[kind] / most:.3g}"
    return cells


def of_worlds(steps):
    parts, plain = [], ("equal", "log-normal", "t(2)", "autoencoder", "char-lm")
    for beta2 in (0.95, 0.999):
        found = {name: measure(*world, beta2) for name, world in worlds(steps).items()}
        rows = [[name, *(found[w][name] for w in plain)] for name in CODES]
        parts += [f"## Moments, beta2 {beta2}", OF_MOMENTS, table(["code", *plain], rows)]
        rows = [
            [name, *(cells[name, guard_of(name)] for cells in found.values())] for name in CODES
        ]
        parts += [f"## Steps, beta2 {beta2}", OF_STEPS, table(["code", *found], rows)]
        kinds = [(name, guard) for name in (NARROW, WIDE) for guard in GUARDS]
        rows = [[*kind, *(cells[kind] for cells in found.values())] for kind in kinds]
        parts += [f"## Guards, beta2 {beta2}", table(["code", "guard", *found], rows)]
    return parts


def repeated(draw, period, beta2, steps=4000, n=1024):
    """Gradients that repeat: v over exact, m's lasting error, correlation of rounding errors."""
    state, truth = Moments(CODES[WIDE], n, beta2, draw), Moments(FLOAT32, n, beta2)
    gradients = np.random.default_rng(3).standard_normal((period or steps, n))
    ratio, lasting, size, errors = 0.0, 0.0, 0.0, []
    for t in range(steps):
        g = gradients[t % len(gradients)].astype(F)
        (m, v, _), _ = state.add(g), truth.add(g)
        if 4 * t > steps:
            ratio, size = ratio + state.v / truth.v.astype(float), size + truth.m.astype(float) ** 2
            lasting = lasting + (state.m - truth.m).astype(float)
            errors.append(((state.v - v) / v.mean(), (state.m - m) / abs(m).mean()))
    count, (v, m) = len(errors), np.array(errors, float).transpose(1, 0, 2)
    together = (v * m).sum() / np.sqrt((v * v).sum() * (m * m).sum())
    return ratio.mean() / count, abs(lasting / np.sqrt(size * count)).mean(), together


def of_draws():
    rows, periods = [], (0, 1, 2, 4, 21, 64)
    for name, draw in DRAWS.items():
        found = [[repeated(draw, p, beta2) for beta2 in (0.95, 0.999)] for p in periods]
        cells = [f"{a[0]:.3f}, {b[0]:.3f}, {a[1]:.1%}" for a, b in found]
        stalls = [stall(CODES[WIDE], 0.95, 100, draw, 16), stall(CODES[WIDE], 0.999, 5000, draw, 2)]
        rows.append([name, *cells, f"{found[0][0][2]:.3f}", *stalls])
    names = ["no period", *(f"period {p}" for p in periods[1:])]
    return [OF_DRAWS, table(["bits", *names, "correlation", "stall, 0.95", "0.999"], rows)]


def learn(codes, guard, world, lr, steps):
    """Excess loss of rows that are to predict a class each, through a fixed layer."""
    rng, n = np.random.default_rng(7), SEEDS * ROWS
    layer = rng.standard_normal((WIDTH, CLASSES)).astype(F) / 8
    rank = np.concatenate([rng.permutation(ROWS) for _ in range(SEEDS)])
    classes, half = rng.integers(CLASSES, size=(2, n)), rank % 2 == 1
    x, state = np.zeros((n, WIDTH), F), Moments(codes, n * WIDTH, 0.999)
    for t in range(steps):
        chance, wanted = 1 / (1 + rank) if world == "rare" else np.ones(n), classes[0]
        if world == "gated" and 4 * t >= steps:
            chance = np.where(half, 4 * t >= 3 * steps, 1.0)
            wanted = np.where(half, classes[1], classes[0])
        p = chance.reshape(SEEDS, ROWS) / chance.reshape(SEEDS, ROWS).sum(1, keepdims=True)
        seen = np.concatenate([rng.choice(ROWS, BATCH, p=q) + s * ROWS for s, q in enumerate(p)])
        noise = rng.random(len(seen)) < 0.3
        target = np.where(noise, rng.integers(CLASSES, size=len(seen)), wanted[seen])
        d = np.exp(x[seen] @ layer)
        d /= d.sum(1, keepdims=True)
        d[np.arange(len(seen)), target] -= 1
        g = np.zeros_like(x)
        np.add.at(g, seen, d @ layer.T / BATCH)
        step = state.step(*state.add(g.ravel()), guard).reshape(n, WIDTH)
        x -= F(lr * min(1, 2 - 2 * t / steps)) * step
    z = (x @ layer).astype(float)
    z -= z.max(1, keepdims=True)
    y = 0.3 / CLASSES + 0.7 * (np.arange(CLASSES) == wanted[:, None])
    loss = (y * (np.log(y) - z + np.log(np.exp(z).sum(1, keepdims=True)))).sum(1)
    weight = (chance * (half if world == "gated" else 1)).reshape(SEEDS, ROWS)
    return (loss.reshape(SEEDS, ROWS) * weight).sum(1) / weight.sum(1)


def of_rows(steps):
    cases, rows = [(w, lr) for w in ("rare", "gated") for lr in (0.003, 0.01)], []
    base = {case: learn(FLOAT32, "none", *case, steps) for case in cases}
    tried = [name for name in CODES if name in (NARROW, WIDE) or "nearest" in name]
    published = [name for name in CODES if name.startswith("published")]
    kinds = [(n, "both") for n in tried + published] + [(n, "none") for n in published]
    for name, guard in kinds:
        ratios = [learn(CODES[name], guard, *case, steps) / base[case] for case in cases]
        rows.append(
            [name, guard, *(f"{r.mean():.3g}, {r.min():.3g}-{r.max():.3g}" for r in ratios)]
        )
    return [OF_ROWS, table(["code", "guards", *(f"{w}, rate {lr}" for w, lr in cases)], rows)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--save", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    # Published codes divide by zero: that is a finding.
    np.seterr(all="ignore")
    today = datetime.date.today().isoformat()
    parts = [f"# Eight-bit codes of moments, {today}", f"{hardware()}.", TEXT, *of_codes()]
    parts += [*of_worlds(options.steps), "## Random bits", *of_draws()]
    text = "\n\n".join([*parts, "## Rows seen seldom", *of_rows(options.steps)]) + "\n"
    print(text)
    if options.save:
        print(save("state-codes", text, today))
