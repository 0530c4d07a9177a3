"""Traces in the trainers: one line, and what was done wrongly is found."""

import pytest
import torch
from torch import nn

from steadygrad.cli import main
from steadygrad.trace import Trace
from tests.integrations import by_hand
from tests.integrations.by_hand import ACCUMULATION, ROWS, STEPS, token_batches

transformers = pytest.importorskip("transformers", reason="group integrations")


def diff(a, b, capsys):
    import json

    capsys.readouterr()
    main(["diff", str(a), str(b), "--json"])
    found = json.loads(capsys.readouterr().out)
    return found["verdict"], found["step"], found["stage"], found["module"]


def hugging_face(folder, name, change=None, resume=None, **options):
    from steadygrad.integrations.transformers import TraceCallback
    from tests.integrations.test_transformers import arguments, make_model

    model = make_model()
    given = arguments(folder / f"out-{name}", bf16=False, **options)
    batches = token_batches(ACCUMULATION * STEPS)
    trainer = transformers.Trainer(
        model,
        given,
        train_dataset=by_hand.rows_from(batches),
        callbacks=[TraceCallback(folder / name)],
    )
    if change:
        change(trainer)
    trainer.train(resume_from_checkpoint=resume)
    return folder / name


def test_hugging_face_in_two_cuts_is_the_same(tmp_path, capsys):
    a = hugging_face(tmp_path, "a")
    cut = {
        "per_device_train_batch_size": ROWS * 2,
        "gradient_accumulation_steps": ACCUMULATION // 2,
    }
    assert diff(a, hugging_face(tmp_path, "b", **cut), capsys)[0] == "same"


def test_hugging_face_resumed(tmp_path, capsys):
    saved = {"save_strategy": "steps", "save_steps": 3}
    a = hugging_face(tmp_path, "a", **saved)
    point = tmp_path / "out-a/checkpoint-3"
    assert diff(a, hugging_face(tmp_path, "b", resume=str(point)), capsys)[0] == "same"
    state = torch.load(point / "optimizer.pt", weights_only=True)
    for moments in state["state"].values():
        moments["exp_avg"].zero_()
    torch.save(state, point / "optimizer.pt")
    found = diff(a, hugging_face(tmp_path, "c", resume=str(point)), capsys)
    assert found == ("part", 3, "optimizer's state", "transformer.wte")


def test_hugging_face_with_a_mean_of_means(tmp_path, capsys):
    """The divisor of accumulation is left out (transformers#34191)."""

    def wrong(trainer):
        plain = trainer.compute_loss
        trainer.compute_loss = lambda *args, **kwargs: plain(*args, **kwargs) * ACCUMULATION

    found = diff(hugging_face(tmp_path, "a"), hugging_face(tmp_path, "b", wrong), capsys)
    assert found[:3] == ("part", 0, "loss")


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x):
        return self.last(self.first(x).tanh())


def batches(steps=8):
    data = torch.Generator().manual_seed(3)
    return [torch.randn(6, 4, generator=data) for _ in range(steps)]


def in_lightning(folder, rate=0.01, forget=None):
    import lightning.pytorch as lightning

    from steadygrad.integrations.lightning import TraceCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inner = Plain()

        def training_step(self, batch, index):
            if index == forget:
                self.trainer.optimizers[0].state.clear()
            return self.inner(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), rate)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, callbacks=[TraceCallback(folder)],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))
    return folder


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_lightning(tmp_path, capsys):
    a = in_lightning(tmp_path / "a")
    assert len([*a.iterdir()]) == 4
    assert diff(a, in_lightning(tmp_path / "b"), capsys)[0] == "same"
    found = diff(a, in_lightning(tmp_path / "c", rate=0.02), capsys)
    assert found == ("part", 0, "update", "inner.first")
    found = diff(a, in_lightning(tmp_path / "d", forget=4), capsys)
    assert found == ("part", 2, "optimizer's state", "inner.first")


def with_accelerate(folder, clip=True):
    from accelerate import Accelerator
    from accelerate.state import GradientState

    GradientState._reset_state()  # trainers of other tests have set it
    model = Plain()
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    model, optimizer = accelerator.prepare(model, optimizer)
    trace = Trace(model, optimizer, folder)
    for x in batches():
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            if accelerator.sync_gradients and clip:
                accelerator.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()
            if accelerator.sync_gradients:
                trace.step()
            optimizer.zero_grad()
    return folder


def test_accelerate(tmp_path, capsys):
    pytest.importorskip("accelerate", reason="group integrations")
    a = with_accelerate(tmp_path / "a")
    assert diff(a, with_accelerate(tmp_path / "b"), capsys)[0] == "same"
    found = diff(a, with_accelerate(tmp_path / "c", clip=False), capsys)
    assert found == ("part", 0, "gradient", "first")
