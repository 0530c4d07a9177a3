"""A gradient watch on two processes: which of them was first, and norms of whole gradients."""

import copy
import math

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

from steadygrad.watch import GradientWatch, check_accumulation
from tests.distributed.ranks import in_turn
from tests.distributed.training import shard
from tests.unit.watch.nets import FAULTS, data, make, mse

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def build():
    return make("residual")[0]


def wrap(model, kind):
    if kind == "ddp":
        return DistributedDataParallel(model)
    return shard(model, *model.blocks)


def found_by(watch):
    found = watch.report()
    return found and [found.kind, found.name, found.rank, found.batch]


def faults(rank, world):
    """All is well; bad batches on rank 1; what it alone sees in backward; a bad micro-batch."""
    return {kind: faults_of(kind, rank) for kind in ("ddp", "fsdp")}


def faults_of(kind, rank):
    said = []
    model = wrap(build(), kind)
    watch = GradientWatch(model)
    for batch in range(3):
        x, y = data(rank + 2 * batch)
        if batch == 1 and rank == 1:
            x[0, 0, 0] = torch.nan
        mse(model(x), y).backward()
        said.append(found_by(watch))
        model.zero_grad()
    watch.close()
    plain = build()
    FAULTS["square root of zero"][0](plain, "blocks.1.")
    if rank == 0:
        plain.blocks[1].place.function = torch.nn.Identity()
    model = wrap(plain, kind)
    watch = GradientWatch(model)
    x, y = data(rank)
    mse(model(x), y).backward()
    said.append(found_by(watch))
    watch.close()
    model = wrap(build(), kind)
    watch = GradientWatch(model)
    # A window of three micro-batches: the first is bad, and its gradients are left to the end.
    for micro in range(3):
        x, y = data(rank + 2 * micro)
        mse(model(x * (torch.nan if rank == 1 and not micro else 1)), y).backward()
    said.append(found_by(watch))
    watch.close()
    # Of two batches that nobody asked about the newer one is told, whoever saw it.
    watch = GradientWatch(model)
    for batch in range(3):
        model.zero_grad()
        x, y = data(rank + 2 * batch)
        mse(model(x * (torch.nan if batch == 2 * rank else 1)), y).backward()
    said.append(found_by(watch))
    return said


def rows(rank, world):
    """A bad row of rank 1's batch, with a loss whose gradient is finite all the same."""
    said = []
    model = wrap(build(), "fsdp")
    watch = GradientWatch(model)
    for batch in range(3):
        model.zero_grad()
        x, y = data(rank + 2 * batch)
        if batch and rank == 1:
            x[batch - 1, 0, 0] = torch.nan
        torch.nn.functional.l1_loss(model(x), y).backward()
        found = watch.report()
        said.append(found and [found.kind, found.rank, found.batch, found.row])
    return said


def norms(rank, world):
    """Norms of sharded gradients, those of one process, and how many collectives they take."""
    model = build()
    model.head.bias.requires_grad_(False)
    whole = copy.deepcopy(model)
    wrap(model, "fsdp")
    watch = GradientWatch(model)
    x, y = data()
    mse(model(x), y).backward()
    mse(whole(x), y).backward()
    watch.norms()  # makes the table of shards
    with CommDebugMode() as counter:
        found = watch.norms()
    alone = GradientWatch(whole, process_group=None).norms()
    wrong = sum(
        float(p.grad.to_local().square().sum()) for p in model.parameters() if p.grad is not None
    )
    pairs = [[found[name], norm] for name, norm in alone.items()]
    pairs += [[math.hypot(*found.values()), math.hypot(*alone.values())]]
    return [pairs, counter.get_total_counts(), wrong**0.5, [*found] == [*alone]]


def loss_of(model, pair):
    return mse(model(pair[0]), pair[1])


def accumulated(rank, world):
    """The same check on a sharded model and on a whole one, with a loop that divides wrongly."""
    found = []
    for sharded in (True, False):
        model = build()
        if sharded:
            wrap(model, "fsdp")

        def window(micros, model=model):
            for micro in micros:
                (loss_of(model, micro) / 4).backward()

        x, y = (torch.cat([tensor] * 4) for tensor in data())
        y[3:] += 1.0
        check = check_accumulation(model, loss_of, (x, y), accumulate=window)
        found.append([[w.bug, w.ratio, w.cosine] for w in check.windows])
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What each rank found, by function."""
    return in_turn(2, [faults, rows, norms, accumulated], tmp_path_factory.mktemp("watch"))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_rank_and_culprit(kind, results):
    expected = [
        None,
        ["batch", "", 1, 1],
        None,
        ["gradient", "blocks.1.place", 1, 0],
        ["batch", "", 1, 0],
        ["batch", "", 1, 2],
    ]
    assert [found[kind] for found in results["faults"]] == [expected, expected]


def test_rank_and_row_of_a_bad_batch(results):
    assert results["rows"] == [[None, ["batch", 1, 1, 0], ["batch", 1, 2, 1]]] * 2


def test_norms_are_those_of_whole_gradients(results):
    for pairs, collectives, local, same_names in results["norms"]:
        # Sums of at most 64 float32 numbers in two orders.
        assert all(a == pytest.approx(b, rel=1e-6) for a, b in pairs)
        assert collectives == 1
        assert local < 0.9 * pairs[-1][1]
        assert same_names


def test_accumulation_of_a_sharded_model(results):
    for sharded, whole in results["accumulated"]:
        assert [window[0] for window in whole] == ["", "other", "means", "other"]
        assert [window[0] for window in sharded] == [window[0] for window in whole]
        for a, b in zip(sharded, whole, strict=True):
            # float32 gradients, averaged over two processes that have the same ones.
            assert a[1:] == pytest.approx(b[1:], rel=1e-5)
