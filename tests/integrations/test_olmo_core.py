"""OLMo-core's own trainer and transformer on random tokens, against a loop by hand."""

import copy
import os
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeSchedule
from tests.distributed.ranks import on_ranks
from tests.integrations import quiet
from tests.integrations.by_hand import IGNORED, token_batches, train_by_hand
from tests.integrations.pages import after, blocks, run

quiet.importorskip("olmo_core", "olmo_core.train.train_module", "olmo_core.data.data_loader")

from olmo_core.data.collator import DataCollator  # noqa: E402
from olmo_core.data.data_loader import TextDataLoaderBase  # noqa: E402
from olmo_core.nn.transformer import TransformerConfig  # noqa: E402
from olmo_core.optim import AdamWConfig  # noqa: E402
from olmo_core.train import Duration, TrainerConfig  # noqa: E402
from olmo_core.train.callbacks import BatchSizeSchedulerCallback, CheckpointerCallback  # noqa: E402
from olmo_core.train.train_module import TransformerTrainModuleConfig  # noqa: E402
from olmo_core.train.train_module.transformer import TransformerDataParallelConfig  # noqa: E402

from steadygrad.integrations.olmo_core import NoiseScaleCallback  # noqa: E402

ROWS, LENGTH, MICROS, STEPS, RANKS = 2, 12, 4, 6, 2
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
        self.steps = [
            batches[i : i + MICROS * ranks] for i in range(0, len(batches), MICROS * ranks)
        ]
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


def make_trainer(folder, batches, callbacks, ranks=1, rank=0, parallel=None, **options):
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
    return TrainerConfig(
        save_folder=str(folder), max_duration=Duration.steps(STEPS), device="cpu",
        callbacks=callbacks, save_overwrite=True, metrics_collect_interval=1, **options,
    ).build(module, Batches(folder, batches, ranks, rank))  # fmt: skip


class WithLogits(nn.Module):
    """The model as the loop by hand calls it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return SimpleNamespace(logits=self.model(input_ids))


def by_hand(model, batches, size=MICROS):
    model = WithLogits(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    windows = [batches[i : i + size] for i in range(0, len(batches), size)]
    return train_by_hand(model, windows, optimizer, dtype=None, ranks=size // MICROS)


def test_noise_scale_is_that_of_a_loop_by_hand(tmp_path):
    batches = token_batches(MICROS * STEPS)
    callback = NoiseScaleCallback(interval=2)
    trainer = make_trainer(tmp_path, batches, {"noise": callback}, no_checkpoints=True)
    expected = by_hand(trainer.train_module.model, batches)
    recorded = {}
    record = trainer.record_metric
    trainer.record_metric = lambda name, value, *a, **k: (
        recorded.update({name: value}),
        record(name, value, *a, **k),
    )
    trainer.fit()
    estimate = callback.noise.estimate()
    assert int(estimate.measurements) == STEPS
    assert int(callback.noise.altered) == 0
    assert float(estimate.value) == pytest.approx(expected.value, rel=1e-3)
    assert recorded["steadygrad/noise_scale/value"] == pytest.approx(float(estimate.value))


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
    pairs = zip(
        again.train_module.model.parameters(), whole.train_module.model.parameters(), strict=True
    )
    assert all(torch.equal(a, b) for a, b in pairs)


def train_on_rank(rank, world, folder, parallel):
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world))
    os.environ.update(FS_LOCAL_RANK=str(rank), NUM_NODES="1")
    batches = token_batches(RANKS * MICROS * STEPS)
    callback = NoiseScaleCallback()
    trainer = make_trainer(
        folder, batches, {"noise": callback}, world, rank, parallel, no_checkpoints=True
    )
    trainer.train_module.model.init_weights(device=torch.device("cpu"), max_seq_len=LENGTH)
    start = {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).tolist()
        for name, p in trainer.train_module.model.named_parameters()
    }
    trainer.fit()
    return {
        "value": float(callback.noise.estimate().value),
        "kind": callback.noise.world.kind,
        "altered": int(callback.noise.altered),
        "start": start,
    }


@pytest.mark.distributed
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_measure_what_one_loop_by_hand_does(parallel, tmp_path):
    found = on_ranks(RANKS, train_on_rank, tmp_path, str(tmp_path / "trained"), parallel)
    model = make_model()
    start = {name.removeprefix("module."): v for name, v in found[0]["start"].items()}
    model.load_state_dict({name: torch.tensor(value) for name, value in start.items()})
    expected = by_hand(model, token_batches(RANKS * MICROS * STEPS), RANKS * MICROS)
    assert [row["kind"] for row in found] == [parallel] * RANKS
    assert [row["altered"] for row in found] == [0] * RANKS
    assert found[0]["value"] == found[1]["value"] == pytest.approx(expected.value, rel=1e-3)


def test_one_micro_batch_is_refused(tmp_path):
    batches = token_batches(MICROS * STEPS)
    trainer = make_trainer(tmp_path, batches, {"noise": NoiseScaleCallback()}, no_checkpoints=True)
    trainer.train_module.rank_microbatch_size *= MICROS
    with pytest.raises(InputError, match="parts a step"):
        trainer.fit()


def test_its_schedule_takes_what_the_writer_writes():
    stages = [{"from_samples": 0, "batch_size": 8}, {"from_samples": 96, "batch_size": 16}]
    text = BatchSizeSchedule(stages).to_olmo_core(LENGTH)
    names = {"BatchSizeSchedulerCallback": BatchSizeSchedulerCallback, "Duration": Duration}
    callback = eval(text, names)
    assert callback.batch_sizes == [96, 192]
    assert callback.schedule == [Duration.tokens(0), Duration.tokens(96 * LENGTH)]


def test_the_page_shows_what_the_writer_writes(capsys):
    run(blocks(PAGE, "python")[0], {}, PAGE)
    assert capsys.readouterr().out == blocks(PAGE, "text")[0]


def test_the_pages_diff_measures(tmp_path):
    batches = token_batches(MICROS * STEPS)
    trainer = make_trainer(tmp_path, batches, {}, no_checkpoints=True)
    module, loader = trainer.train_module, Batches(tmp_path, batches)
    config = TrainerConfig(
        save_folder=str(tmp_path), max_duration=Duration.steps(STEPS), device="cpu",
        no_checkpoints=True,
    )  # fmt: skip
    names = {"trainer_config": config, "train_module": module, "data_loader": loader}
    found = run(after(blocks(PAGE, "diff")[0]), names, PAGE)
    noise = found["trainer"].callbacks["noise_scale"].noise
    assert int(noise.estimate().measurements) == STEPS
