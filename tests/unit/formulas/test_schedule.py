"""`BatchSizeSchedule`: the same stages in every form."""

import csv
import io
import json

import pytest

from steadygrad._checks import InputError
from steadygrad.noise import BatchSizeSchedule

STAGES = [
    {"from_samples": 0, "batch_size": 16, "lr": 1e-3},
    {"from_samples": 4000, "batch_size": 32, "lr": None},
    {"from_samples": 4096, "batch_size": 64, "lr": None},
]


def test_json_round_trip():
    schedule = BatchSizeSchedule(STAGES)
    assert BatchSizeSchedule.from_json(schedule.to_json()) == schedule


def test_csv_has_every_number():
    rows = list(csv.DictReader(io.StringIO(BatchSizeSchedule(STAGES).to_csv())))
    assert [r["batch_size"] for r in rows] == ["16", "32", "64"]
    assert [r["lr"] for r in rows] == ["0.001", "", ""]


def test_megatron_text():
    assert BatchSizeSchedule(STAGES).to_megatron() == "0:16 4K:32 4096:64"
    assert BatchSizeSchedule(STAGES[:2]).to_megatron(250_000) == "0:16 1B:32"


def test_lookup():
    schedule = BatchSizeSchedule(STAGES)
    assert [schedule.batch_size(n) for n in (0, 3999, 4000, 10**9)] == [16, 16, 32, 64]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nope", "Expected a JSON list of stages"),
        ("[1]", "Expected a stage with `from_samples`.* Found 1. Remedy"),
        ('[{"from": 0}]', "Expected a stage with .* Found {'from': 0}. Remedy"),
        ("3", "`stages` should be of type Iterable. Found 3, of type int. Remedy"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(InputError, match=message):
        BatchSizeSchedule.from_json(text)


@pytest.mark.parametrize("lr", ["x", 0.0, float("nan"), True])
def test_a_learning_rate_is_a_positive_number(lr):
    with pytest.raises(InputError, match=r"`lr` should be a finite number in \(0, inf\).*Remedy"):
        BatchSizeSchedule([{**STAGES[0], "lr": lr}])
    with pytest.raises(InputError, match="`lr` should be"):
        BatchSizeSchedule.from_json(json.dumps([{**STAGES[0], "lr": lr}]))


def test_a_stage_begins_at_a_whole_sample():
    with pytest.raises(InputError, match="`from_samples` should be an integer"):
        BatchSizeSchedule([STAGES[0], {"from_samples": 1.5, "batch_size": 9}])


@pytest.mark.parametrize("stages", [[], STAGES[1:], [STAGES[0], STAGES[2], STAGES[1]]])
def test_bad_stages(stages):
    with pytest.raises(InputError, match=r"begin at 0 and in rising order.*Remedy: sort them"):
        BatchSizeSchedule(stages)


GROWS = [
    {"from_samples": 0, "batch_size": 16},
    {"from_samples": 6000, "batch_size": 64},
    {"from_samples": 24000, "batch_size": 128},
]


class Duration:
    """OLMo-core's, as far as its callback is built with it."""

    @staticmethod
    def tokens(tokens):
        return ("tokens", tokens)


def olmo_core(text):
    """Arguments that the call hands to `BatchSizeSchedulerCallback`."""
    return eval(text, {"BatchSizeSchedulerCallback": dict, "Duration": Duration})


def test_olmo_core_counts_everything_in_tokens():
    assert olmo_core(BatchSizeSchedule(GROWS).to_olmo_core(64)) == {
        "batch_sizes": [1024, 4096, 8192],
        "schedule": [("tokens", 0), ("tokens", 384_000), ("tokens", 1_536_000)],
    }


def test_olmo_core_refuses_a_batch_size_twice_so_the_second_is_left_out():
    twice = [GROWS[0], {"from_samples": 100, "batch_size": 16}, GROWS[1]]
    found = olmo_core(BatchSizeSchedule(twice).to_olmo_core(1))
    assert found["batch_sizes"] == [16, 64]
    assert found["schedule"] == [("tokens", 0), ("tokens", 6000)]


@pytest.mark.parametrize(("before", "after"), [(16, 24), (24, 16)])
def test_olmo_core_takes_integer_factors_only(before, after):
    stages = [{"from_samples": 0, "batch_size": before}, {"from_samples": 9, "batch_size": after}]
    with pytest.raises(InputError, match=r"integer factors\. Found 24 and 16\. Remedy"):
        BatchSizeSchedule(stages).to_olmo_core(64)


class GradientAccumulationScheduler:
    """Lightning's, as far as counting goes."""

    def __init__(self, scheduling):
        self.scheduling = scheduling

    def get_accumulate_grad_batches(self, at):
        return self.scheduling[max(start for start in self.scheduling if start <= at)]


class Loop:
    """A trainer whose windows end where its batches are a multiple of the factor, as both do."""

    def __init__(self):
        self.global_step, self.windows = 0, []

    def train(self, batches, before_batch, factor):
        window = 0
        for done in range(1, batches + 1):
            before_batch()
            window += 1
            if done % factor() == 0:
                self.global_step += 1
                self.windows.append(window)
                window = 0


def lightning(schedule, batch_size, batches):
    """Micro-batches of each optimizer step."""
    names = {"GradientAccumulationScheduler": GradientAccumulationScheduler}
    exec(schedule.to_lightning(batch_size), names)
    loop = Loop()
    loop.train(
        batches,
        lambda: names["callback"].on_train_batch_start(loop, None, None, 0),
        lambda: loop.accumulate_grad_batches,
    )
    return loop.windows


def hugging_face(schedule, batch_size, batches):
    names = {"TrainerCallback": object}
    exec(schedule.to_hugging_face(batch_size), names)
    callback, loop = names["BatchSizes"](), Loop()

    def before_batch():
        callback.on_train_begin(loop, loop, None)

    assert type(callback).on_step_end is type(callback).on_train_begin
    loop.train(batches, before_batch, lambda: loop.gradient_accumulation_steps)
    return loop.windows


@pytest.mark.parametrize("trainer", [lightning, hugging_face])
def test_accumulation_follows_the_schedule_and_cuts_no_window(trainer):
    windows = trainer(BatchSizeSchedule(GROWS), 8, 4000)
    # Stages begin after 750 and 3000 micro-batches; 752 and 3008 are multiples of 8 and of 16.
    assert windows == [2] * 376 + [8] * 282 + [16] * 62


@pytest.mark.parametrize("trainer", [lightning, hugging_face])
def test_factors_that_do_not_divide_each_other_meet_at_a_common_multiple(trainer):
    stages = [{"from_samples": 0, "batch_size": 4}, {"from_samples": 50, "batch_size": 6}]
    # 25 micro-batches: the next multiple of both 2 and 3 is 30.
    assert trainer(BatchSizeSchedule(stages), 2, 60) == [2] * 15 + [3] * 10


@pytest.mark.parametrize("trainer", [lightning, hugging_face])
def test_a_stage_that_is_over_before_it_can_begin_is_left_out(trainer):
    stages = [
        {"from_samples": 0, "batch_size": 8},
        {"from_samples": 17, "batch_size": 16},
        {"from_samples": 25, "batch_size": 32},
    ]
    assert trainer(BatchSizeSchedule(stages), 8, 12) == [1] * 4 + [4] * 2


@pytest.mark.parametrize("trainer", [lightning, hugging_face])
def test_no_stage_begins_before_the_one_ahead_of_it(trainer):
    stages = [
        {"from_samples": 0, "batch_size": 4},
        {"from_samples": 1, "batch_size": 6},
        {"from_samples": 2, "batch_size": 2},
    ]
    # The second stage has to wait until 12, and the third one begins there, too.
    assert trainer(BatchSizeSchedule(stages), 1, 18) == [4] * 3 + [2] * 3


@pytest.mark.parametrize("form", ["to_lightning", "to_hugging_face"])
def test_micro_batches_are_whole(form):
    with pytest.raises(InputError, match=r"its multiples\. Found 16 and 12\. Remedy"):
        getattr(BatchSizeSchedule(GROWS), form)(12)
    with pytest.raises(InputError, match="`batch_size` should be"):
        getattr(BatchSizeSchedule(GROWS), form)(0)
