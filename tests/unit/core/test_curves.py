"""Curves from plain output: the small language, well-known shapes, and lines that mean harm."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from diamond.core.curves import MAX_LINE_BYTES, Pattern, Reader, parse_curves
from diamond.core.errors import InvalidInput
from diamond.core.tasks import TaskSpec

NOW = 1_700_000_000.0


def read(text: str | bytes, patterns: list[str] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
    data = text.encode() if isinstance(text, str) else text
    found = Reader(patterns, **kwargs).feed(data, NOW, is_last=True)
    assert all(record.pop("t") == NOW for record in found)
    return found


# The field


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ({}, None),
        ({"curves": None}, None),
        ({"curves": "auto"}, None),
        ({"curves": True}, None),
        ({"curves": False}, ()),
        ({"curves": "off"}, ()),
        ({"curves": []}, ()),
        ({"curves": "loss: {loss}"}, ("loss: {loss}",)),
        ({"curves": ["  loss:   {loss} ", "acc {a/b.c-d_1}%"]}, ("loss: {loss}", "acc {a/b.c-d_1}%")),
    ],
)
def test_what_the_field_takes(written: dict[str, Any], meant: object) -> None:
    assert TaskSpec.parse({"run": "x", **written}).curves == meant


@pytest.mark.parametrize(
    ("written", "words"),
    [
        (3, "list of patterns"),
        ({"loss": "x"}, "list of patterns"),
        ([3], "pattern 1 must be text"),
        (["loss {loss}", "loss"], "pattern 2 has no number"),
        (["loss {loss"], "without a }"),
        (["loss loss}"], "without a {"),
        (["loss {}"], "names a curve ''"),
        (["loss {a b}"], "names a curve 'a b'"),
        (["loss {" + "x" * 65 + "}"], "names a curve"),
        (["loss {t}"], "time of a point"),
        (["{loss}"], "every line"),
        (["* {loss} *"], "every line"),
        (["a {loss}{acc}"], "nothing between"),
        (["a {loss} {loss}"], "twice"),
        (["a1{loss}"], "digit right before"),
        (["loss\x00 {loss}"], "control characters"),
        (["x" * 195 + "{loss}"], "at most 200"),
        (["loss {loss}"] * 21, "at most 20"),
    ],
)
def test_mistakes_name_the_field_and_the_fix(written: object, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        TaskSpec.parse({"run": "x", "curves": written})
    assert caught.value.field == "curves"
    assert words in caught.value.message
    assert caught.value.hint or "e.g." in caught.value.message


@given(st.text(max_size=60) | st.text("{}*ab 1./", max_size=30))
def test_any_pattern_is_taken_as_it_is_written_back_or_refused(text: str) -> None:
    try:
        found = parse_curves([text])
    except InvalidInput:
        return
    assert parse_curves(list(found or ())) == found
    Pattern.parse(text).match(text)


# Patterns


def test_the_example_of_the_guide() -> None:
    log = "Epoch 3/10 loss: 0.25 acc 91%\nbuild 7\n2024 Epoch  4/10  [##]\t loss:  1e-4 acc -.5%, 3 s\n"
    assert read(log, ["Epoch {epoch}/* loss: {train/loss} acc {acc}%"]) == [
        {"step": 3, "train/loss": 0.25, "acc": 91},
        {"step": 4, "train/loss": 1e-4, "acc": -0.5},
    ]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("-0.5", -0.5), ("+2.", 2), ("1e-4", 1e-4), (".5", 0.5), ("nan", "NaN"), ("NaN", "NaN"),
     ("inf", "Infinity"), ("-Inf", "-Infinity"), ("1e999", "Infinity"),
     ("12345678901234567890", 12345678901234567890.0)],
)  # fmt: skip
def test_numbers(text: str, value: object) -> None:
    assert read(f"x {text} y", ["x {a}"]) == [{"step": 0, "a": value}]
    assert json.loads(json.dumps(value, allow_nan=False)) == value


@pytest.mark.parametrize("text", ["one", "1,234", "", "-", "e5", "infinite", "nano", "1" * 50])
def test_no_numbers(text: str) -> None:
    assert read(f"x {text} y", ["x {a}"]) == []


def test_signs_stand_for_themselves_when_doubled() -> None:
    assert read("{'loss': 3} a*b 4", ["{{'loss': {loss}}} a**b {b}"]) == [{"step": 0, "loss": 3, "b": 4}]


def test_a_digit_may_stand_behind_a_number() -> None:
    assert read("loss 0.5x10\nloss 3 0\n", ["loss {loss} 0"]) == [{"step": 0, "loss": 3}]
    assert read("loss 12\n", ["loss {loss}2"]) == [], "a number is all of its digits"


def test_steps() -> None:
    both = ["epoch {epoch}", "step {step}", "loss {loss}"]
    log = "loss 9\nepoch 1 step 10 loss 1\nloss 2\nepoch 2\nloss 3\n"
    assert [record["step"] for record in read(log, both)] == [0, 10, 10, 2], "the step wins; others go on with it"
    counted = read("loss 9\nval 1\nloss 8\nval 2 loss 7\n", ["loss {loss}", "val {val}"])
    assert counted == [
        {"step": 0, "loss": 9},
        {"step": 0, "val": 1},
        {"step": 1, "loss": 8},
        {"step": 2, "val": 2, "loss": 7},
    ]
    assert read("epoch nan loss 1", both) == [{"step": 0, "loss": 1}]


def test_the_first_place_that_fits_counts() -> None:
    assert read("loss x loss 3 loss 4", ["loss {loss}"]) == [{"step": 0, "loss": 3}]
    assert read("a 1 b 2 c 3", ["a*{x}"]) == [{"step": 0, "x": 1}]
    assert read("v1.5.2 of 7", ["of*{x}"]) == [{"step": 0, "x": 7}]


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 10**9), st.text("ab c%:\t|[]-", max_size=20))
@example(1e-300, 0, "")
def test_what_is_printed_comes_back(value: float, step: int, noise: str) -> None:
    line = f"{noise} it {step} loss={value} {noise}\n"
    assert read(line, ["it {step} loss={loss}"]) == [{"step": step, "loss": value}]


# Logs


BAR = "".join(f"\r {n}%|##  | {n}/100 [00:01<00:02, loss={n / 100}]" for n in range(1, 101)) + "\n"


def test_colours_ranks_and_ends_of_lines() -> None:
    assert read("\x1b[1;32mloss:\x1b[0m \x1b]0;title\x07 0.5\r\nloss: 0.4\r\n", ["loss: {loss}"]) == [
        {"step": 0, "loss": 0.5},
        {"step": 1, "loss": 0.4},
    ]
    ranked = "setup loss: 9\n[1] loss: 8\n[0] loss: 0.5\n[10] loss: 7\n[0] x\r[0] loss: 0.4\n"
    assert [record["loss"] for record in read(ranked, ["loss: {loss}"], ranked=True)] == [0.5, 0.4]


@pytest.mark.parametrize("patterns", [None, ["{step}/*loss={loss}]"]])
def test_bars(patterns: list[str] | None) -> None:
    whole = read(BAR, patterns)
    assert whole[-1] == {"step": 100, "loss": 1.0}
    assert 10 <= len(whole) <= 41
    reader, found = Reader(patterns), []
    for second in range(10):  # a thousand states a second
        for n in range(1000):
            step = second * 1000 + n
            found += reader.feed(f"\r {step}/10000 [loss={step}]".encode(), NOW + second + n / 1000)
    assert 10 <= len(found) <= 40 + 10 * 4
    assert [record["step"] for record in found] == sorted({record["step"] for record in found})


@given(st.lists(st.integers(1, 40), max_size=40), st.integers(0, 2**32))
def test_it_does_not_matter_how_a_log_is_cut_nor_who_goes_on(cuts: list[int], seed: int) -> None:
    lines = "Epoch {n}/9\nloss: {v}.5 - acc: 0.{n}\nwords\n\x1b[1mval loss 0.25\x1b[0m\n"
    log = "".join(lines.format(n=n, v=seed % (n + 2)) for n in range(4)).encode() + b"loss: 7"
    for patterns in (None, ["Epoch {epoch}/", "loss: {loss}"]):
        reader, found, offset = Reader(patterns), [], 0
        for size in cuts:
            found += reader.feed(log[offset : offset + size], NOW)
            offset = min(len(log), offset + size) - reader.num_unread  # a restored one reads its unfinished line again
            state = json.loads(json.dumps(reader.state()))
            reader = reader.renewed()
            reader.restore(state)
        found += reader.feed(log[offset:], NOW, is_last=True)
        assert [dict(record, t=0) for record in found] == [dict(record, t=0) for record in read(log, patterns)]


@given(st.dictionaries(st.sampled_from(["words", "place", "counts", "fed_at", "credit", "last_of_bar", "skipping"]),
       st.none() | st.text() | st.lists(st.integers()) | st.integers() | st.dictionaries(st.text(), st.integers()))
)  # fmt: skip
def test_a_state_that_somebody_else_wrote_does_no_harm(state: dict[str, Any]) -> None:
    reader = Reader(None)
    reader.restore(state)
    reader.feed(b"x\nstep 3 loss: 0.5\n", NOW)
    json.dumps(reader.state())


# Well-known shapes


@pytest.mark.parametrize(
    ("log", "found"),
    [
        (  # Keras
            "Epoch 1/10\n\r 10/50 [==>...] - ETA: 3s - loss: 0.9\r50/50 [====] - 5s 3ms/step - loss: 0.3 - acc: 0.9\n"
            "Epoch 2/10\n50/50 - 5s - loss: 0.2 - val_loss: 0.25\n",
            [
                {"step": 10, "loss": 0.9},
                {"step": 50, "loss": 0.3, "acc": 0.9},
                {"step": 100, "loss": 0.2, "val_loss": 0.25},
            ],
        ),
        (  # Hugging Face
            "{'loss': 0.3, 'grad_norm': 1.25, 'learning_rate': 5e-05, 'epoch': 0.48}\n"
            "{'eval_loss': 0.2, 'eval_accuracy': 0.9, 'eval_runtime': 3.2, 'epoch': 1.0}\n",
            [
                {"step": 0.48, "loss": 0.3, "grad_norm": 1.25, "learning_rate": 5e-05},
                {"step": 1, "eval_loss": 0.2, "eval_accuracy": 0.9},
            ],
        ),
        (  # Lightning
            "Epoch 0: 100%|███| 469/469 [00:05<00:00, 90.0it/s, v_num=0, train_loss=0.3]\n"
            "Epoch 1: 100%|███| 469/469 [00:05<00:00, 90.0it/s, v_num=0, train_loss=0.2]\n",
            [{"step": 469, "train_loss": 0.3}, {"step": 938, "train_loss": 0.2}],
        ),
        (  # the examples of PyTorch
            "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.3\n"
            "Test set: Average loss: 0.0504, Accuracy: 9834/10000 (98%)\n"
            "Train Epoch: 2 [640/60000 (1%)]\tLoss: 1.3\n",
            [
                {"step": 640, "loss": 2.3},
                {"step": 640, "test_loss": 0.0504, "test_accuracy": 0.9834},
                {"step": 60640, "loss": 1.3},
            ],
        ),
        (
            "Epoch: [0][  10/5005]\tTime  0.5 ( 0.9)\tLoss 6.9e+00 (7.0e+00)\tAcc@1   0.10 (  0.10)\n",
            [{"step": 10, "loss": 6.9, "acc_1": 0.1}],
        ),
        ("[10]\ttrain-rmse:0.3\teval-rmse:0.4\n", [{"step": 10, "train-rmse": 0.3, "eval-rmse": 0.4}]),
        ("step 250: train loss 2.1, val loss 2.2\n", [{"step": 250, "train_loss": 2.1, "val_loss": 2.2}]),
        ("Epoch 3, Train Loss: 0.3 | Val Acc: 91%\n", [{"step": 3, "train_loss": 0.3, "val_acc": 91}]),
        ("epoch 1 iter 9 loss 0.5\nepoch 2 iter 3 loss .4\n", [{"step": 9, "loss": 0.5}, {"step": 12, "loss": 0.4}]),
        ("step 10 | loss 3.2 | lr 1e-4 | 12345 tok/s\n", [{"step": 10, "loss": 3.2, "lr": 1e-4, "tok/s": 12345}]),
        ("Epoch  2/30 | loss: 0.3 | lr 0.1\n", [{"step": 2, "loss": 0.3, "lr": 0.1}]),
        ("Training 3/10 loss: 0.3\n", [{"step": 3, "loss": 0.3}]),
        ("Training:  30%|## | 3/10 [00:01<00:02, 2.1it/s, loss=0.3]\n", [{"step": 3, "loss": 0.3}]),
        ("loss: nan\nval_loss 0.3\n", [{"step": 0, "loss": "NaN"}, {"step": 1, "val_loss": 0.3}]),
        ("loss=tensor(0.5, device='cuda:0', grad_fn=<X>)\n", [{"step": 0, "loss": 0.5}]),
        ("2024-01-02 12:30:45,123 INFO root:loss: 0.3\n", [{"step": 0, "loss": 0.3}]),
        ("01/02 12:30:45 psnr=31.5 ssim=0.9\n", [{"step": 0, "psnr": 31.5, "ssim": 0.9}]),
        ('{"step": 5, "loss": 0.3}\n', [{"step": 5, "loss": 0.3}]),
    ],
)
def test_shapes_that_everybody_knows(log: str, found: list[dict[str, Any]]) -> None:
    assert read(log) == found


ORDINARY = """\
Collecting torch==2.9.0
  Downloading torch-2.9.0-cp311-none-linux_x86_64.whl (899.7 MB)
     ━━━━━━━━━━━━━━━━━━━━━━━━ 899.7/899.7 MB 12.3 MB/s eta 0:00:00
Successfully installed accelerate-1.2.0 torch-2.9.0 lossless-0.3
ERROR: pip's dependency resolver does not take 2 packages into account
Downloading: 100%|██████████| 170498071/170498071 [00:13<00:00, 12.5MB/s]
Namespace(lr=0.01, epochs=10, batch_size=32, seed=1)
learning_rate: 0.001
max_grad_norm: 1.0
2024-01-02 12:30:45,123 INFO connected to 10.0.0.1:8080 in 0.35 s
Traceback (most recent call last):
  File "/home/alice/train.py", line 12, in loss
    loss = 0.5
    loss = loss_fn(x) / 2.0
RuntimeError: CUDA error: device-side assert triggered
/opt/x.py:12: UserWarning: the accuracy of 3 values
    loss = 0.5 * (a - b).mean()
error: 2 errors generated.
urllib.error.HTTPError: HTTP Error 404: Not Found
GET https://example.org/?loss=0.5&acc=0.9 200
saved /scratch/run/epoch=3-val_loss=0.12.ckpt and best_loss=0.3.pt
3 packets transmitted, 3 received, 0% packet loss, time 2003ms
10 packets transmitted, packet loss 0.5 %
loss of 5 nodes; accuracy 5; score: 12; map 3/4; recall 7
Epoch 3/10
Test 4/5 passed in 0.31 s
return 0.5
version 1.2.3, error 1.2.3.4, loss 1,234
drwxr-xr-x 2 alice users 4096 Jan  2 12:30 loss
"""


def test_ordinary_text_makes_no_curves() -> None:
    for line in ORDINARY.splitlines():
        if not line.startswith("    loss = "):
            assert read(line) == [], line
    assert read(ORDINARY) == []


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_is_survived(text: str) -> None:
    for record in read(text + "\n"):
        json.dumps(record, allow_nan=False)
    read(text, ["a {b} *c{d}"], ranked=True)


def test_few_names_are_made_up() -> None:
    found = read("".join(f"run{n}_loss: 0.5\n" for n in range(500)))
    assert len({name for record in found for name in record if name != "step"}) == 64


# Harm


HOSTILE = [
    (["x*{a}y"], "x" + "1" * 2**20), (["*{a}y{b}z"], "1 " * 2**19), (["a " * 98 + "{x}"], "a " * 2**19),
    (["a*" * 60 + "b{x}"], "a" * 2**20), (["a {x}"], "a" + " " * 2**20), (["-{x}y"], "-1" * 2**19),
    (["e{x}!"], "e1.1" * 2**18), (["a{x}a{y}b"], "a1" * 2**19), (None, "loss " * 2**18), (None, "loss: 0.5 " * 2**17),
    (None, "a_" * 2**19 + "loss"), (None, "loss: 0.3 " + "1/2 " * 2**18), (None, "epoch 1 " + "[1] " * 2**18),
    (None, "loss: " + "1" * 2**20), (None, "loss" + "-" * 2**20), (None, "\x1b[" * 2**19), (["a{x}"], "\r" * 2**20),
]  # fmt: skip


@pytest.mark.parametrize(("patterns", "line"), HOSTILE)
@pytest.mark.parametrize("cut", [MAX_LINE_BYTES - 1, 2**20])
def test_no_line_takes_long(patterns: list[str] | None, line: str, cut: int) -> None:
    data = line[:cut].encode()[:cut] + b"\n"
    best = 9.0
    for _ in range(5):
        reader = Reader(patterns)
        began = time.perf_counter()
        reader.feed(data, NOW)
        best = min(best, time.perf_counter() - began)
        if best < 0.05:
            break
    assert best < 0.05


def test_the_matcher_itself_is_linear() -> None:
    for patterns, line in HOSTILE:
        if patterns is not None:
            pattern, text = Pattern.parse(patterns[0]), " ".join(line.split())
            began = time.perf_counter()
            pattern.match(text)
            assert time.perf_counter() - began < 0.5, patterns


def test_lines_without_an_end_are_passed_over() -> None:
    reader = Reader(["loss {loss}"])
    found = []
    for _ in range(40):
        found += reader.feed(b"loss 1 " * 1000, NOW)
        assert reader.num_unread <= MAX_LINE_BYTES
    found += reader.feed(b"loss 2\nloss 3\n", NOW)
    assert [record["loss"] for record in found] == [3]
