"""Commands: their metric, and how they fail and end."""

import math
import os
import sys

import pytest

import steadygrad
from steadygrad._checks import InputError
from steadygrad.studies.ab.command import RunFailed, metric_of, plain, run_command
from steadygrad.studies.ab.schema import Settings
from tests.unit.studies.framework import alive, recorded


def run(command, cwd=".", poll=lambda: None, timeout=0.0):
    return run_command(command, str(cwd), Settings(metric=r"x=(\S+)", timeout=timeout), poll)


# As public training scripts print: nanoGPT, modded-nanogpt, PyTorch's MNIST, fairseq, timm, Keras,
# Hugging Face's Trainer 4 and 5 and its `log_metrics`, Megatron-LM, torchtitan, Lightning, wandb.
PRINTED = [
    (
        "step 0: train loss 4.2, val loss 4.3\nstep 9: train loss 1.9, val loss 2.0134\niter 9:",
        r"val loss ([\d.]+)",
        2.0134,
    ),
    ("step:9/9 val_loss:3.2788 train_time:194ms step_avg:", r"val_loss:([\d.]+)", 3.2788),
    ("\nTest set: Average loss: 0.0521, Accuracy: 9832/10000 (98%)\n", r"loss: (\S+)", 0.0521),
    ("\nTest set: Average loss: 0.0521, Accuracy: 9832/10000 (98%)\n", r"\((.*)\)", 98.0),
    ("| epoch 2 | valid on 'valid' subset | ppl 6.54 | best_loss 4.1", r"\| ppl (\S+)", 6.54),
    ("*** Best metric: 77.02 (epoch 9)\n--result\n", r"Best metric: (\S+)", 77.02),
    ('--result\n{\n    "all": [\n {\n "top1": 71.0\n}\n],\n "top1": 77.02,\n}', "top1", 77.02),
    ("9/9 ━━━━ 0s 2ms/step - loss: 0.31 - val_loss: 0.3412\x08\x08", r"val_loss: ([\d.]+)", 0.3412),
    ("{'eval_loss': 0.51, 'epoch': 1.0}\n100%|##| 5/5 [00:01<", "eval_loss", 0.51),
    ("\r 50%|# | 5/10 {'eval_loss': '0.51', 'epoch': '1'}\r", "eval_loss", 0.51),
    ("  epoch    =     1.0\n  perplexity    =   25.5647\n", r"perplexity\s+= +(\S+)", 25.5647),
    ("iteration 9 | lm loss value: 3.123456E+00 | lm loss PPL: 2E+01 |", r"value: (\S+)", 3.123456),
    ("\x1b[31mstep: 10  \x1b[32mloss:  7.12345  \x1b[38;5;2mmem\x1b[0m", r"loss: +(\S+)", 7.12345),
    ("\x1b[1m│\x1b[36m val_loss \x1b[0m│\x1b[35m 0.4312 \x1b[0m│", r"val_loss │ *(.*?) *│", 0.4312),
    ("\x1b[34mwandb\x1b[0m:  val_loss 0.4312\nwandb: ", r"val_loss (\S+)", 0.4312),
]


@pytest.mark.parametrize(
    ("text", "metric", "value"),
    [
        *PRINTED,
        ("x=1\nx=-2e-3\ny=5", r"x=(\S+)", -2e-3),
        ("x=1\nx=oops", r"x=(\S+)", "oops"),
        ('{"x": 1}\n{"x": 0.5, "y": 2}\n{"y": 3}\nnot json\n[1]\n7', "x", 0.5),
        ('{"x": 0.5, "y": {"x": 2}} and more', "x", 0.5),
        ('{"x": 1} {"x": 0.5}{', "x", 0.5),
        ('epoch {1}: {"x": 0.5}', "x", 0.5),
        ('{\n "x": 0.5,\n "best": {\n  "x": 0.4\n }\n}\ndone', "x", 0.5),
        ('{"x": 1}\n{not\n"x": 0.5', "x", 0.5),
        ("{'x': [0.25, 0.75]}", "x", "[0.25, 0.75]"),
        ("{'x': 0.5, 'y': {'x': 0.9}} {", "x", 0.5),
        ("1,522.34 bpb", r"(\d+\.\d+) bpb", "1,522.34"),
        ("1,0.34 bpb", r"(\d+\.\d+) bpb", 0.34),
        ("x=-0.5", r"x\D*(\d+\.\d+)", "-0.5"),
        ("x-0.5", r"x-(\d+\.\d+)", 0.5),
        ("x=12.34", r"x.*(\d+\.\d+)", "12.34"),
        ("x=1.5k", r"x=([\d.]+)", "1.5k"),
        ("x=1:30", r"x=(\d+)", "1:30"),
        ("x" * 1022 + " 12.34 bpb" + " y" * 700, r"(\d+\.\d+) bpb", 12.34),
        ("x" * 1020 + " val_x=0.3" + " y" * 700, r"^x=(\S+)", None),
        ("x=" + "1" * 49 + ".0", r"x=(\d+)", "1" * 49 + ".0"),
        ("7\n" + "a" * 1023 + "\n5" + "a" * 1500, r"^(\d+)$", 7.0),
        ('{"x": 1}\n{"x": null}', "x", "None"),
        ('{"x": 1}\n{"x": [1, 2]}', "x", "[1, 2]"),
        ('{"\\u00e9": 2}', "é", 2.0),
        ('{"x": 1}\n{"x": 0.5, "y": "\u2028"}', "x", 0.5),
        ('{"x": 1%s}' % ("0" * 400), "x", math.inf),
        ("[[[" * 9999 + '"x": 0.5', "x", 0.5),
        ("x=1\nx=nan", r"x=([0-9.]+)", "nan"),
        ("x=5.4e-06", r"x=([0-9.]+)", "5.4e-06"),
        ("x=0.54", r"x=([0-9])", "0.54"),
        ("1\n2", r"([0-9.]+)", 2.0),
        ("-0.5", r"([0-9.]+)", "-0.5"),
        ("0.5", r"(?m)^([0-9.]+)$", 0.5),
        ("1\n0.5\ntime 3", r"^([0-9.]+)$", 0.5),
        ("loss (val)=0.5", r"loss [(]val[)]=(\S+)", 0.5),
        ("loss=0.5", r"(?:loss=([0-9.]+))", 0.5),
        ("loss=0.5\nloss=nan", r"loss=(?P<value>[0-9.]+)", "nan"),
        ("(loss=0.5).\n", r"loss=(\S+)", 0.5),
        ("x=0.5;", r"x=(\S+)", 0.5),
        ("x=tensor(0.5,", r"x=(\S+)", "tensor(0.5,"),
        ("ppl 1,522.34 bits", r"ppl ([\d.]+)", "1,522.34"),
        ("ppl 1,522.34 bits", r"ppl (\S+)", 1522.34),
        ("ppl 0,66", r"ppl (\d+)", "0,66"),
        ("ppl 1_522", r"ppl (\d+)", "1_522"),
        ("3,0.5,0.66", r"^3,([\d.]+)", 0.5),
        ("no number", r"x=(\S+)", None),
        ("no number", "x", None),
    ],
)
def test_the_last_metric_counts(text, metric, value):
    assert metric_of(plain(text.encode()), metric) == value


def test_a_command_runs_in_its_folder_and_prints_to_either_stream(tmp_path):
    (tmp_path / "here").write_text("x=3.5")
    assert run("cat here 1>&2", tmp_path)[0] == 3.5


@pytest.mark.slow
def test_a_pattern_that_may_begin_anywhere_is_tried_on_parts_of_a_long_line():
    """On the whole line it would be tried for an hour."""
    assert metric_of("x=7 " + "." * (1 << 20) + " x=0.5", r".*x=(\S+)") == 0.5


@pytest.mark.parametrize("last", ["out", "err"])
def test_what_two_streams_print_comes_in_order(last):
    """Python's, whose standard output waits in a buffer where it is no terminal."""
    code = "import sys; out, err = sys.stdout, sys.stderr; " + "; ".join(
        f"print('x={value}', file={name})"
        for value, name in enumerate(["out", "err", "out", "err", last])
    )
    assert run(f'env -u PYTHONUNBUFFERED {sys.executable} -c "{code}"')[0] == 4


def test_the_writer_of_a_log_comes_to_its_end():
    """It ends after the shell that began it."""
    assert run("bash -c 'echo x=1; echo x=2 > >(sleep 0.3; cat)'")[0] == 2


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("echo x=1; echo bye; exit 7", "exit code 7, after 'bye'"),
        ("echo x=1; kill -TERM $$", "ended by signal 15, after 'x=1'"),
        ("echo 'y=1'", "no number .*, after 'y=1'"),
        ("echo x=1; echo x=oops", "'oops', .*, after 'x=oops'"),
        ("true", "no number .*, after ''"),
        # It has no input, and no children that it did not start.
        (
            f"exec {sys.executable} -c 'import os, sys; sys.stdin.read(); os.wait()'",
            "No child processes",
        ),
    ],
)
def test_a_run_that_fails_says_why(command, why):
    with pytest.raises(RunFailed, match=why):
        run(command, timeout=60)


def test_what_is_not_the_commands_fault_is_no_failed_run(tmp_path, monkeypatch):
    """But ends the study."""

    def full():
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="nowhere") as caught:
        run("echo x=1", tmp_path / "nowhere")
    assert not isinstance(caught.value, RunFailed)
    monkeypatch.setattr(os, "openpty", full)
    with pytest.raises(InputError, match="No space left"):
        steadygrad.ab(
            "echo x={seed}",
            "echo x=1{seed}",
            metric="x=(.*)",
            out=tmp_path / "run",
            progress=False,
        )
    assert recorded(tmp_path / "run") == 0


@pytest.mark.parametrize("end", ["timeout", "interrupted", "done"])
@pytest.mark.parametrize("start", ["", "setsid"])
def test_nothing_of_a_command_is_left(end, start, tmp_path):
    """Nor of its grandchildren, in sessions of their own, before the next one begins."""
    path = tmp_path / "pid"
    command = f"{start} sh -c 'echo $$ > {path}; exec sleep 60' & echo x=1"
    command += f"; while [ ! -s {path} ]; do sleep 0.01; done"

    def poll():
        if end == "interrupted" and path.exists() and path.read_text():
            raise KeyboardInterrupt

    if end == "done":
        assert run(command)[0] == 1
    else:
        expected = {"timeout": RunFailed, "interrupted": KeyboardInterrupt}[end]
        with pytest.raises(expected):
            run(f"({command}; wait)", poll=poll, timeout=1.5 * (end == "timeout"))
    assert not alive(int(path.read_text()))


def test_the_peak_of_memory_is_the_commands_own():
    assert run("echo x=1")[1]["peak_bytes"] < 1 << 26
    size = 1 << 28
    _, took = run(f'{sys.executable} -c \'b = b"x" * {size}; print("x=1")\'')
    # Beside Python itself.
    assert 1.0 <= took["peak_bytes"] / size < 1.2
