"""Each rank's report on sharded steps; the assertions are in test_optim.py."""

import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.func import functional_call

from tests.distributed.optim_checkpoints import load, save
from tests.distributed.optim_models import (
    FLOAT32,
    LAYOUTS,
    MAKERS,
    batch,
    difference,
    feed,
    local,
    locals_of,
    loss_of,
    make,
    net,
    same_bits,
    shard_fsdp,
    split_types,
    train,
    whole,
)

# Enough for two steps of the sizes and for a threshold to clip by.
STEPS, EARLY, FEW = 20, 6, 9


def _numbers(report):
    """Every number of a report, by the path to it."""
    if isinstance(report, dict):
        pairs = report.items()
    elif isinstance(report, list):
        pairs = enumerate(report)
    else:
        return {"": report}
    return {f"{key}/{path}": n for key, value in pairs for path, n in _numbers(value).items()}


def _unlike(report, reference):
    """Differences between two reports, but for float32 sums in another order."""
    ours, theirs = _numbers(report), _numbers(reference)
    close = {
        key
        for key in ours.keys() & theirs.keys()
        if abs(ours[key] - theirs[key]) <= 1e-4 * abs(theirs[key]) + 1e-7
    }
    return sorted((ours.keys() | theirs.keys()) - close)


def trajectories(world):
    """20 steps: the largest difference from one process, whether it clipped, and step 6."""
    found, early = {"reports": {}}, {}
    for name, maker in MAKERS.items():
        reference = make("none")
        optimizer = maker(reference.parameters())
        train(reference, optimizer, range(STEPS))
        state = optimizer.state[reference.gain]
        found[f"{name} clipped"] = float(state.get("num_clipped", torch.ones(())))
        expected = optimizer.diagnostics(top=99)
        for layout in LAYOUTS[world]:
            model = make(layout)
            optimizer = maker(model.parameters())
            train(model, optimizer, range(EARLY), layout)
            early[f"{name} {layout}"] = [t.clone() for t in locals_of(model, optimizer)]
            train(model, optimizer, range(EARLY, STEPS), layout)
            found[f"{name} {layout}"] = difference(model, reference)
            assert optimizer.skipped == 0
            unlike = _unlike(optimizer.diagnostics(top=99), expected)
            found["reports"][f"{name} {layout}"] = [len(_numbers(expected)), unlike]
    return found, early


def _counted(step):
    """How many collectives a step makes, and over how many processes each."""
    sizes, original = [], dist.all_reduce

    def counting(tensor, *args, group=None, **kwargs):
        sizes.append(dist.get_world_size(group))
        return original(tensor, *args, group=group, **kwargs)

    dist.all_reduce = counting
    try:
        with CommDebugMode() as mode:
            step()
    finally:
        dist.all_reduce = original
    return [mode.get_total_counts(), sizes]


def collectives(world):
    """Of the first step, which finds out about the shards, and of the next."""
    found = {}
    for layout in LAYOUTS[world]:
        for extra in (0, 94):  # 13 and 201 parameters
            model = make(layout, extra=extra)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            for name, maker in MAKERS.items():
                optimizer = maker(model.parameters())
                counts = [_counted(optimizer.step) for _ in range(2)]
                found[f"{name} {layout} {len(list(model.parameters()))}"] = counts
    return found


def _spoil(model, layout):
    """An infinite element in one shard, on every process that holds a copy of it."""
    weight = (model.module if layout == "ddp" else model).second.weight
    grad = weight.grad
    first = True
    if isinstance(grad, DTensor):
        here = grad.device_mesh.get_coordinate()
        split = [axis for axis, p in enumerate(grad.placements) if p.is_shard()]
        first = all(here[axis] == 0 for axis in split)
    if first:
        local(grad)[0, 0] = torch.inf


def skipping(world, clean):
    """Bad steps, among them the first, change nothing on any rank; rank 1 has an infinite loss."""
    found = {}
    for name, maker in MAKERS.items():
        for layout in LAYOUTS[world]:
            model = make(layout)
            optimizer = maker(model.parameters())
            for step in range(EARLY):
                if step in (0, 2, 4):
                    optimizer.zero_grad()
                    loss = loss_of(model, step, layout)
                    # With tensor parallelism all ranks have one loss.
                    bad = step != 4 and layout != "tp" and dist.get_rank() == 1
                    (loss * torch.inf if bad else loss).backward()
                    if step == 4 or layout == "tp":
                        _spoil(model, layout)
                    optimizer.step()
                train(model, optimizer, [step], layout)
            same = same_bits(locals_of(model, optimizer), clean[f"{name} {layout}"])
            found[f"{name} {layout}"] = [same, float(optimizer.skipped)]
    return found


def scaler(world, clean):
    """torch's GradScaler on FSDP2, with an infinite loss on rank 1 alone in two of eight steps."""
    found = {}
    for name, maker in MAKERS.items():
        for explicit in (False, True):
            model = make("fsdp")
            # Only a fused step takes what the scaler leaves, and counts what it skips.
            optimizer = maker(model.parameters(), fused=True)
            amp = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
            visits = [
                (s, bad) for s in range(EARLY) for bad in (True, False) if s in (0, 3) or not bad
            ]
            for step, bad in visits:
                optimizer.zero_grad()
                loss = amp.scale(loss_of(model, step, "fsdp"))
                (loss * torch.inf if bad and dist.get_rank() == 1 else loss).backward()
                if explicit:
                    amp.unscale_(optimizer)
                amp.step(optimizer)
                amp.update()
            same = same_bits(locals_of(model, optimizer), clean[f"{name} fsdp"])
            found[f"{name} {explicit}"] = [same, float(optimizer.skipped), amp.get_scale()]
    return found


def masters(world):
    """bfloat16 weights with float32 masters and weights of float32, from the same gradients."""
    found = {}
    for name, maker in MAKERS.items():
        model, reference = shard_fsdp(split_types(net())), split_types(net())
        optimizer, twin = maker(model.parameters()), maker(reference.parameters())
        feed(model, optimizer, range(FEW))
        feed(reference, twin, range(FEW))
        worst, kept = 0.0, 0
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            a, b = (
                s.get("master_weight", w) for s, w in ((optimizer.state[p], p), (twin.state[q], q))
            )
            worst = max(worst, float((whole(a) - whole(b)).abs().max()))
            kept += a is not p
            assert isinstance(a, DTensor)
            assert a.dtype == torch.float32
            # A weight is its master's rounding.
            assert torch.equal(local(a).to(p.dtype), local(p))
        found[name] = [worst, kept]
    return found


def mixed_precision(world):
    """FSDP2's policy: computed in bfloat16, reduced in float32. One process does the same."""
    found = {}
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for name, maker in MAKERS.items():
        model, reference = shard_fsdp(net(), mp_policy=policy), net()
        optimizer, twin = maker(model.parameters()), maker(reference.parameters())
        for step in range(FEW):
            optimizer.zero_grad()
            model(batch(step, "fsdp").bfloat16()).float().square().mean().backward()
            optimizer.step()
            twin.zero_grad()
            for x in batch(step).bfloat16().chunk(world):
                narrow = {key: p.bfloat16() for key, p in reference.named_parameters()}
                (
                    functional_call(reference, narrow, (x,)).float().square().mean() / world
                ).backward()
            twin.step()
        assert all(p.grad is None or p.grad.dtype == torch.float32 for p in model.parameters())
        found[name] = difference(model, reference)
    return found


class Sequence(nn.Module):
    """Norms on parts of a sequence: with tensor parallelism their gradients are partial sums."""

    def __init__(self, norms: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(norms))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(sum(norm(x) for norm in self.norms))))


def sequence_parallel(world):
    found = {}
    plan = {
        "norms.*": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(),
    }
    for name, maker in FLOAT32.items():
        for norms in (1, 4):
            torch.manual_seed(0)
            reference = Sequence(norms)
            model = copy.deepcopy(reference)
            parallelize_module(model, init_device_mesh("cpu", (world,)), plan)
            pairs = [(m, maker(m.parameters())) for m in (reference, model)]
            for step in range(FEW):
                x = torch.randn(2, 4, 6, generator=torch.Generator().manual_seed(step))
                for trained, optimizer in pairs:
                    optimizer.zero_grad()
                    trained(x).square().mean().backward()
                    if step:
                        optimizer.step()
                    else:
                        count = _counted(optimizer.step)[0]
            assert model.norms[0].weight.grad.placements == (Partial(),)
            found[f"{name} {norms}"] = [difference(model, reference), count]
    return found


def everything(rank, world, folder):
    """All of it from one start: four processes save checkpoints, two load them."""
    differences, early = trajectories(world)
    found = {
        "trajectories": differences,
        "collectives": collectives(world),
        "skipping": skipping(world, early),
        "scaler": scaler(world, early),
        "masters": masters(world),
        "mixed precision": mixed_precision(world),
        "checkpoints": (save if world == 4 else load)(world, folder),
    }
    if world == 2:
        found["sequence parallel"] = sequence_parallel(world)
    return found
