"""OLMo-core's own trainer and transformer on random tokens, against a loop by hand."""

import copy
import os
import warnings
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from tests.contracts.problems import assert_same
from tests.distributed.ranks import on_ranks
from tests.integrations import by_hand
from tests.integrations.by_hand import ACCUMULATION as MICROS
from tests.integrations.by_hand import IGNORED, RANKS, ROWS, STEPS, chunks, token_batches
from tests.integrations.pages import after, blocks, run

olmo_core = pytest.importorskip("olmo_core", reason="group integrations")
with warnings.catch_warnings():
    # Of much that is no matter of these tests.
    warnings.simplefilter("ignore")
    from olmo_core.data.collator import DataCollator
    from olmo_core.data.data_loader import TextDataLoaderBase
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.optim import AdamWConfig
    from olmo_core.train import Duration, TrainerConfig
    from olmo_core.train.callbacks import CheckpointerCallback
    from olmo_core.train.train_module import TransformerTrainModuleConfig
    from olmo_core.train.train_module.transformer import TransformerDataParallelConfig

from steadygrad.integrations.olmo_core import NoiseScaleCallback  # noqa: E402

LENGTH = 12
PAGE = "olmo_core.md"
pytestmark = [
    # What it says of itself, of CUDA, and of torch's newer names.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


class Batches(TextDataLoaderBase):
    """Batches that are in memory; each rank takes its own part of a step's."""

    def __init__(self, folder, batches, ranks=1, rank=0):
        self.steps = chunks(batches, MICROS * ranks)
        super().__init__(
            collator=DataCollator(pad_token_id=0), work_dir=folder, dp_world_size=ranks,
            dp_rank=rank, global_batch_size=ROWS * LENGTH * MICROS * ranks, fs_local_rank=rank,
        )  # fmt: skip

    @property
    def total_batches(self):
        return len(self.steps)

    def state_dict(self):
        return {"batches_processed": self.batches_processed, "epoch": self._epoch}

    def load_state_dict(self, state):
        self.batches_processed, self._epoch = state["batches_processed"], state["epoch"]

    def reshuffle(self, epoch=None, **_):
        self._epoch = epoch or 1

    def _iter_batches(self):
        for step in self.steps[self.batches_processed :]:
            mine = step[self.dp_rank * MICROS : (self.dp_rank + 1) * MICROS]
            ids = torch.cat([batch["input_ids"] for batch in mine])
            kept = torch.cat([batch["labels"] for batch in mine]) != IGNORED
            yield {"input_ids": ids, "label_mask": kept}

    def get_mock_batch(self):
        return {"input_ids": torch.zeros(ROWS * MICROS, LENGTH, dtype=torch.int64)}


def make_model():
    torch.manual_seed(0)
    config = TransformerConfig.llama_like(d_model=16, vocab_size=31, n_layers=2, n_heads=2)
    model = config.build(init_device="cpu")
    model.init_weights(device=torch.device("cpu"), max_seq_len=LENGTH)
    return model


def parts_of(folder, batches, callbacks, ranks=1, rank=0, parallel=None, **options):
    """The trainer's configuration, the train module and the data loader."""
    config = TransformerTrainModuleConfig(
        rank_microbatch_size=ROWS * LENGTH, max_sequence_length=LENGTH, max_grad_norm=1.0,
        optim=AdamWConfig(lr=1e-2, weight_decay=0.0, betas=(0.9, 0.999), eps=1e-8),
        dp_config=None if parallel is None else TransformerDataParallelConfig(name=parallel),
    )  # fmt: skip
    start = make_model()
    module = config.build(make_model(), device=torch.device("cpu"))
    if parallel is None:
        # It has drawn its own weights.
        module.model.load_state_dict(start.state_dict())
    trainer = TrainerConfig(
        save_folder=str(folder), max_duration=Duration.steps(STEPS), device="cpu",
        callbacks=callbacks, save_overwrite=True, metrics_collect_interval=1, **options,
    )  # fmt: skip
    return trainer, module, Batches(folder, batches, ranks, rank)


def make_trainer(*args, **options):
    config, module, batches = parts_of(*args, **options)
    return config.build(module, batches)


class WithLogits(nn.Module):
    """The model as the loop by hand calls it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.model(input_ids))


def train_by_hand(model, batches, ranks=1):
    model = WithLogits(copy.deepcopy(model))
    windows, optimizer = chunks(batches, MICROS * ranks), by_hand.adamw(model)
    return by_hand.train_by_hand(model, windows, optimizer, dtype=None, ranks=ranks)


def test_noise_scale_is_that_of_a_loop_by_hand(tmp_path):
    batches = token_batches(MICROS * STEPS)
    callback = NoiseScaleCallback(interval=2)
    trainer = make_trainer(tmp_path, batches, {"noise": callback}, no_checkpoints=True)
    expected = train_by_hand(trainer.train_module.model, batches)
    recorded = {}
    trainer.record_metric = lambda name, value, *a, **k: recorded.update({name: value})
    trainer.fit()
    by_hand.assert_measured(callback.noise, expected)
    value = float(callback.noise.estimate().value)
    assert recorded["steadygrad/noise_scale/value"] == pytest.approx(value)


def test_resumes_to_the_bit(tmp_path):
    batches = token_batches(MICROS * STEPS)

    def callbacks():
        return {
            "noise": NoiseScaleCallback(),
            "checkpointer": CheckpointerCallback(save_interval=3),
        }

    whole = make_trainer(tmp_path / "whole", batches, callbacks())
    whole.fit()
    again = make_trainer(tmp_path / "again", batches, callbacks())
    again.load_checkpoint(f"{tmp_path}/whole/step3")
    again.fit()
    # A checkpoint before the first step keeps what was loaded.
    kept = NoiseScaleCallback()
    assert kept.state_dict() == {}
    kept.load_state_dict(whole.callbacks["noise"].state_dict())
    assert kept.state_dict()["noise"]["steps"] == STEPS
    found, wanted = (t.callbacks["noise"].noise.state_dict()["ring"] for t in (again, whole))
    assert torch.equal(found, wanted)
    assert_same(again.train_module.model.parameters(), whole.train_module.model.parameters())


def train_on_rank(rank, world, folder):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(FS_LOCAL_RANK=str(rank), NUM_NODES="1")
    batches = token_batches(RANKS * MICROS * STEPS)
    callback = NoiseScaleCallback()
    trainer = make_trainer(
        folder, batches, {"noise": callback}, world, rank, "fsdp", no_checkpoints=True
    )
    trainer.train_module.model.init_weights(device=torch.device("cpu"), max_seq_len=LENGTH)
    parameters = trainer.train_module.model.named_parameters()
    start = {name: p.full_tensor().tolist() for name, p in parameters}
    trainer.fit()
    return {**by_hand.found_on_rank(callback.noise), "start": start}


@pytest.mark.distributed
def test_two_processes_measure_what_one_loop_by_hand_does(tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path / "trained"))
    model, start = make_model(), found[0]["start"]
    model.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
    expected = train_by_hand(model, token_batches(RANKS * MICROS * STEPS), RANKS)
    by_hand.assert_measured_on_ranks(found, "fsdp", expected)


def test_one_micro_batch_is_refused(tmp_path):
    batches = token_batches(MICROS * STEPS)
    trainer = make_trainer(tmp_path, batches, {"noise": NoiseScaleCallback()}, no_checkpoints=True)
    trainer.train_module.rank_microbatch_size *= MICROS
    with pytest.raises(InputError, match="parts a step"):
        trainer.fit()


def test_the_schedule_on_the_page_is_one_of_its_own(capsys):
    run(blocks(PAGE, "python")[0], {}, PAGE)
    text = capsys.readouterr().out
    assert text == blocks(PAGE, "text")[0]
    callback = eval(text, vars(olmo_core.train) | vars(olmo_core.train.callbacks))
    assert callback.batch_sizes == [8 * 4096, 16 * 4096]
    assert callback.schedule == [Duration.tokens(0), Duration.tokens(96 * 4096)]


def test_the_pages_diff_measures(tmp_path):
    parts = parts_of(tmp_path, token_batches(MICROS * STEPS), {}, no_checkpoints=True)
    names = dict(zip(("trainer_config", "train_module", "data_loader"), parts, strict=True))
    found = run(after(blocks(PAGE, "diff")[0]), names, PAGE)
    noise = found["trainer"].callbacks["noise_scale"].noise
    assert int(noise.estimate().measurements) == STEPS
