"""Options that cannot be used are refused by name."""

import inspect

import pytest
import torch

from steadygrad._checks import InputError
from tests.contracts.problems import parameters
from tests.contracts.table import OPTIMIZERS, TABLE

every_optimizer = pytest.mark.parametrize("entry", TABLE.values(), ids=TABLE)

WRONG = [(name, *case) for name, entry in OPTIMIZERS.items() for case in entry.wrong]


@pytest.mark.parametrize(("name", "options", "message"), WRONG)
def test_wrong_options_are_refused_by_name(name, options, message):
    with pytest.raises(ValueError, match=message):
        OPTIMIZERS[name]([torch.zeros(3, requires_grad=True)], **options)


@every_optimizer
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"maximise": True}, "'maximise'.*'maximize'"),
        ({"lr_mult": 2.0}, r"'lr_mult'.*param_groups\(model"),
        ({"lr": torch.tensor(1)}, "`lr`.*int64"),
        ({"lr": torch.tensor(-1.0)}, "`lr`.*0 or more"),
        ({"lr": torch.tensor(torch.nan)}, "`lr`"),
        ({"lr": torch.tensor([0.1]).to_sparse()}, "`lr`"),
        ({"lr": torch.tensor(0.1, device="meta")}, "`lr`"),
        ({"foreach": "yes"}, "`foreach`.*True, False, None.*'yes'"),
        ({"maximize": None}, "`maximize`.*True, False. Found None"),
    ],
    ids=str,
)
def test_a_groups_wrong_option_is_refused(entry, option, message):
    with pytest.raises(InputError, match=message):
        entry([{"params": parameters(), **option}])
    # What schedules and users put there is none of the optimizer's business.
    entry([{"params": parameters(), "initial_lr": 0.1, "name": "a", "lr_scale": 3}])


@every_optimizer
def test_the_signature_is_the_list_of_options(entry):
    signature = inspect.signature(entry.make).parameters.values()
    given = {p.name: p.default for p in signature if p.name != "params"}
    assert entry.make(parameters()).defaults == given
