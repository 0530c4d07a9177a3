"""The planted faults on a device, and a step that does not wait for it."""

import pytest

from steadygrad.watch import GradientWatch
from tests.gpu.waiting import no_waiting
from tests.unit.watch.nets import FAULTS, NETS, data, make, mse


@pytest.mark.parametrize("net", NETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_culprit(net, fault):
    put, loss, kind, name = FAULTS[fault]
    model, prefix = make(net)
    put(model, prefix)
    model.cuda()
    for module in model.modules():
        if hasattr(module, "mask"):
            module.mask = module.mask.cuda()
    watch = GradientWatch(model)
    x, y = (tensor.cuda() for tensor in data())
    loss(model(x), y).backward()
    found = watch.report()
    assert (found.kind, found.name) == (kind, name.format(prefix))


def test_no_wait_while_all_is_well():
    model, _ = make("residual")
    model.cuda()
    watch = GradientWatch(model)
    x, y = (tensor.cuda() for tensor in data())
    mse(model(x), y).backward()
    model.zero_grad()
    with no_waiting():
        for _ in range(3):
            mse(model(x), y).backward()
            model.zero_grad()
    assert (watch.report(), watch.batches) == (None, 4)
