"""Losses of the user's own in Hugging Face's Trainer, and arguments that are refused at once."""

import copy

import pytest
import torch

from tests.integrations.by_hand import IGNORED, token_batches, train_by_hand
from tests.integrations.test_transformers import (
    ACCUMULATION,
    STEPS,
    SteadygradMixin,
    Trainer,
    arguments,
    chunks,
    make_model,
    rows_from,
    transformers,
)


class Plain(Trainer):
    """The usual override, which says that its loss is a mean over one micro-batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


class Handing(Trainer):
    """Looks at the inputs, and leaves the loss to the Trainer."""

    def compute_loss(self, model, inputs, *args, **kwargs):
        assert "labels" in inputs
        return super().compute_loss(model, inputs, *args, **kwargs)


class Reading(Trainer):
    """Divides by the window's labels."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return model(**inputs, num_items_in_batch=num_items_in_batch).loss


def summed_loss(outputs, labels, num_items_in_batch=None):
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    loss = torch.nn.functional.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED, reduction="sum"
    )
    return loss / num_items_in_batch


@pytest.mark.parametrize(
    ("kind", "function", "by_tokens"),
    [
        (Plain, None, False),
        (Handing, None, True),
        (Reading, None, True),
        (Trainer, summed_loss, True),
    ],
    ids=["plain", "handing", "reading", "function"],
)
def test_micro_batches_weigh_as_the_trainer_is_told(kind, function, by_tokens, tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    options = arguments(tmp_path, learning_rate=0.0)
    trainer = kind(
        make_model(), options, train_dataset=rows_from(batches), compute_loss_func=function
    )
    model = copy.deepcopy(trainer.model)
    still = torch.optim.SGD(model.parameters(), lr=0.0)
    expected = train_by_hand(model, chunks(batches), still, by_tokens=by_tokens)
    trainer.train()
    assert int(trainer.noise.altered) == 0
    assert float(trainer.noise.estimate().value) == pytest.approx(expected.value, rel=1e-3)


BAD = {
    "number": ({"noise_scale": 1}, "`noise_scale`"),
    "none": ({"noise_scale": None}, "`noise_scale`"),
    "schedule": ({"batch_sizes": [8, 16]}, "`schedule`"),
}


@pytest.mark.parametrize("case", BAD)
def test_arguments_that_are_refused_when_the_trainer_is_made(case, tmp_path):
    given, words = BAD[case]
    with pytest.raises((ValueError, TypeError), match=words):
        Trainer(make_model(), arguments(tmp_path), **given)


def test_samples_may_be_a_number(tmp_path):
    found = []
    for samples in (2, None):
        batches = token_batches(ACCUMULATION)
        options = {} if samples is None else {"samples": samples}
        trainer = Trainer(
            make_model(),
            arguments(tmp_path, max_steps=1),
            train_dataset=rows_from(batches),
            noise_scale=options,
        )
        trainer.train()
        found.append(trainer.noise.state_dict()["ring"])
    assert torch.equal(*found)


def test_bases_in_the_wrong_order_are_refused():
    with pytest.raises(TypeError, match="method resolution"):

        class Wrong(transformers.Trainer, SteadygradMixin):
            pass
