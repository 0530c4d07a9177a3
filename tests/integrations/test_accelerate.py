"""The recipe for Accelerate, as its page has it, against a loop by hand."""

import os
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from steadygrad import NoiseScale
from steadygrad.integrations.metrics import noise_metrics
from steadygrad.optim import LANS
from tests.contracts.problems import assert_same
from tests.distributed.ranks import on_ranks
from tests.integrations import by_hand
from tests.integrations.by_hand import ACCUMULATION, RANKS, ROWS, STEPS, token_batches
from tests.integrations.pages import after, blocks, run

accelerate = pytest.importorskip("accelerate", reason="group integrations")
pytest.importorskip("transformers", reason="group integrations")

PAGE = "accelerate.md"


def loss_of(model, batch):
    return by_hand.next_tokens(model(input_ids=batch["input_ids"]).logits, batch["labels"])


def lans(model):
    return LANS(model.named_parameters(), lr=1e-2)


class Run:
    """Names that the page's code takes for granted, and those that it defines."""

    def __init__(self, batches, make_optimizer=by_hand.adamw):
        # Accelerate keeps its state for the whole process.
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION, mixed_precision="bf16"
        )
        model = by_hand.gpt2()
        model, optimizer, loader = self.accelerator.prepare(
            model, make_optimizer(model), DataLoader(by_hand.rows_from(batches), batch_size=ROWS)
        )
        self.names = {
            "NoiseScale": NoiseScale, "accelerator": self.accelerator, "model": model,
            "optimizer": optimizer, "loader": loader, "loss_of": loss_of,
        }  # fmt: skip

    def train(self, code=None):
        run(after(blocks(PAGE, "diff")[0]) if code is None else code, self.names, PAGE)
        return self.names["noise"]


def train_by_hand(batches, size, make_optimizer):
    model = by_hand.gpt2()
    windows = by_hand.chunks(batches, size)
    return model, by_hand.train_by_hand(model, windows, make_optimizer(model), by_tokens=False)


def test_the_recipe_measures_what_a_loop_by_hand_does():
    batches = token_batches(ACCUMULATION * STEPS)
    model, expected = train_by_hand(batches, ACCUMULATION, lans)
    done = Run(batches, lans)
    by_hand.assert_measured(noise := done.train(), expected)
    by_hand.assert_trained_alike(done.names["model"], model, by_hand.gpt2())
    # The page's numbers for trackers.
    logged = []
    tracked = SimpleNamespace(log=lambda row, step: logged.append((row, step)))
    done.names.update(steps=STEPS, accelerator=tracked)
    done.train(blocks(PAGE, "python")[0])
    assert logged == [(noise_metrics(noise), STEPS)]


def test_a_state_resumes_to_the_bit(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    half = ACCUMULATION * STEPS // 2
    whole, first, second = (Run(part, lans) for part in (batches, batches[:half], batches[half:]))
    wanted = whole.train().state_dict()
    first.train()
    first.accelerator.save_state(str(tmp_path))
    code = after(blocks(PAGE, "diff")[0]).split("for batch", 1)
    loop = f"{code[0]}accelerator.load_state({str(tmp_path)!r})\nfor batch{code[1]}"
    found = second.train(loop).state_dict()
    assert_same(second.names["model"].parameters(), whole.names["model"].parameters())
    assert torch.equal(found["ring"], wanted["ring"])
    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert saved["steps"] == STEPS // 2


def train_on_rank(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    # The process group is there already, over a file; this is how Accelerate learns of it.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    return by_hand.found_on_rank(Run(token_batches(RANKS * ACCUMULATION * STEPS)).train())


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path)
    batches = token_batches(RANKS * ACCUMULATION * STEPS)
    _, expected = train_by_hand(batches, RANKS * ACCUMULATION, by_hand.adamw)
    by_hand.assert_measured_on_ranks(found, "ddp", expected)
