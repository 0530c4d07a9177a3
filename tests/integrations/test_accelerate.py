"""The recipe for Accelerate, as its page has it, against a loop by hand."""

import os

import pytest
import torch
from torch.utils.data import DataLoader

from steadygrad import NoiseScale
from steadygrad.integrations.windows import windows
from steadygrad.noise import BatchSizeSchedule
from steadygrad.optim import LANS
from tests.distributed.ranks import on_ranks
from tests.integrations.by_hand import (
    IGNORED,
    assert_trained_alike,
    token_batches,
    train_by_hand,
)
from tests.integrations.pages import after, blocks, run

accelerate = pytest.importorskip("accelerate", reason="group integrations")
transformers = pytest.importorskip("transformers", reason="group integrations")

ROWS, ACCUMULATION, STEPS, RANKS = 2, 4, 6, 2
PAGE = "accelerate.md"


def make_model():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, use_cache=False,
        bos_token_id=0, eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def loss_of(model, batch):
    logits = model(input_ids=batch["input_ids"]).logits[:, :-1]
    targets = batch["labels"][:, 1:].flatten()
    return torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets, ignore_index=IGNORED
    )


class Run:
    """Names that the page's code takes for granted, and those that it defines."""

    def __init__(self, batches, make_optimizer=None):
        # Accelerate keeps its state for the whole process.
        accelerate.state.AcceleratorState._reset_state(True)
        accelerate.state.GradientState._reset_state()
        self.accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=ACCUMULATION, mixed_precision="bf16"
        )
        model = make_model()
        make_optimizer = make_optimizer or adamw
        rows = [{k: v[i] for k, v in batch.items()} for batch in batches for i in range(ROWS)]
        model, optimizer, loader = self.accelerator.prepare(
            model, make_optimizer(model), DataLoader(rows, batch_size=ROWS)
        )
        self.names = {
            "NoiseScale": NoiseScale, "accelerator": self.accelerator, "model": model,
            "optimizer": optimizer, "loader": loader, "loss_of": loss_of,
        }  # fmt: skip

    def train(self, code=None):
        run(after(blocks(PAGE, "diff")[0]) if code is None else code, self.names, PAGE)
        return self


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)


def lans(model):
    return LANS(model.named_parameters(), lr=1e-2)


def chunks(batches, size=ACCUMULATION):
    return [batches[i : i + size] for i in range(0, len(batches), size)]


def by_hand(batches, size=ACCUMULATION, make_optimizer=adamw):
    model = make_model()
    noise = train_by_hand(model, chunks(batches, size), make_optimizer(model), by_tokens=False)
    return noise, model


def test_the_recipe_has_at_most_eight_lines():
    added = [line for line in blocks(PAGE, "diff")[0].splitlines() if line.startswith("+")]
    assert 0 < len(added) + 1 <= 8


@pytest.mark.parametrize("make_optimizer", [adamw, lans])
def test_the_recipe_measures_what_a_loop_by_hand_does(make_optimizer):
    batches = token_batches(ACCUMULATION * STEPS)
    expected, model = by_hand(batches, make_optimizer=make_optimizer)
    done = Run(batches, make_optimizer).train()
    estimate = done.names["noise"].estimate()
    assert int(estimate.measurements) == STEPS
    assert int(done.names["noise"].altered) == 0
    assert float(estimate.value) == pytest.approx(expected.value, rel=1e-3)
    assert_trained_alike(done.names["model"], model, make_model())


def test_a_state_resumes_to_the_bit(tmp_path):
    batches = token_batches(ACCUMULATION * STEPS)
    half = ACCUMULATION * STEPS // 2
    whole = Run(batches, lans).train()
    first = Run(batches[:half], lans).train()
    first.accelerator.save_state(str(tmp_path))
    second = Run(batches[half:], lans)
    code = after(blocks(PAGE, "diff")[0]).split("for batch", 1)
    loop = f"{code[0]}accelerator.load_state({str(tmp_path)!r})\nfor batch{code[1]}"
    second.train(loop)
    for found, wanted in zip(
        second.names["model"].parameters(), whole.names["model"].parameters(), strict=True
    ):
        assert torch.equal(found, wanted)
    found, wanted = (each.names["noise"].state_dict() for each in (second, whole))
    assert torch.equal(found["ring"], wanted["ring"])
    saved = torch.load(tmp_path / "custom_checkpoint_0.pkl", weights_only=True)
    assert saved["steps"] == STEPS // 2


def test_skipped_steps_are_counted_inside_of_the_wrapper():
    done = Run(token_batches(ACCUMULATION), lans)
    done.names["loss_of"] = lambda model, batch: loss_of(model, batch) * float("inf")
    done.train()
    assert int(done.names["optimizer"].optimizer.skipped) == 1
    assert not hasattr(done.names["optimizer"], "skipped")


def test_numbers_for_its_trackers(tmp_path):
    done = Run(token_batches(ACCUMULATION * STEPS)).train()
    logged = {}

    class Tracked:
        @staticmethod
        def log(row, step):
            logged.update(row, step=step)

    done.names.update(steps=STEPS, accelerator=Tracked)
    done.train(blocks(PAGE, "python")[0])
    value = float(done.names["noise"].estimate().value)
    assert logged["steadygrad/noise_scale/value"] == pytest.approx(value)
    assert logged["step"] == STEPS


def train_on_rank(rank, world):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), ACCELERATE_USE_CPU="true")
    # The process group is there already, over a file; this is how Accelerate learns of it.
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT="0")
    done = Run(token_batches(RANKS * ACCUMULATION * STEPS)).train()
    noise = done.names["noise"]
    return {
        "value": float(noise.estimate().value),
        "kind": noise.world.kind,
        "altered": int(noise.altered),
    }


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path)
    expected, _ = by_hand(token_batches(RANKS * ACCUMULATION * STEPS), RANKS * ACCUMULATION)
    assert [row["kind"] for row in found] == ["ddp"] * RANKS
    assert [row["altered"] for row in found] == [0] * RANKS
    assert found[0]["value"] == found[1]["value"] == pytest.approx(expected.value, rel=1e-3)


def test_windows_of_a_schedule_are_those_that_accelerate_makes():
    stages = [{"from_samples": 0, "batch_size": 4}, {"from_samples": 10, "batch_size": 8}]
    done = Run(token_batches(24))
    walk, sizes, micro = windows(BatchSizeSchedule(stages), ROWS), [], 0
    accelerator, model = done.accelerator, done.names["model"]
    accelerator.gradient_accumulation_steps = next(walk).factor
    for batch in done.names["loader"]:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model, batch))
            micro += 1
            if accelerator.sync_gradients:
                sizes, micro = [*sizes, micro], 0
                accelerator.gradient_accumulation_steps = next(walk).factor
    assert sizes == [2, 2, 2, 2, 4, 4, 4, 4]
