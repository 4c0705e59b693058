"""Well-known shapes of training output, for scripts that say nothing of curves: which words are metrics, and where in
a line the step stands.

Pure. Says nothing rather than something wrong: only words that mean a metric everywhere are taken, and those that also
stand in ordinary text only with a number that looks measured. Every expression here is bounded in length at each place
of a line, so that no line takes long.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache

# The longest number that stands here. In a lookahead with a reference to it, so that a shorter one is never tried.
DIGITS = r"(?:[0-9]{1,40}(?:\.[0-9]{1,40})?|\.[0-9]{1,40})(?:[eE][+-]?[0-9]{1,3})?(?![0-9]|,[0-9]{3}(?![0-9]))"
NUMBER = rf"[+-]?(?:{DIGITS}|(?:[nN][aA][nN]|[iI][nN][fF](?:inity)?)(?![A-Za-z0-9_]))"
MAX_NAMES = 64  # curves of one job that are made without being asked for
_MAX_NAME = 64

_MAIN = (
    r"loss|nll|acc|accuracy|top[15]|perplexity|ppl|f1|f1_score|auc|auroc|roc_auc|mse|rmse|mae|mape|wer|bleu"
    r"|rouge[_-]?[l12]|iou|miou|dice|psnr|ssim|fid|elbo|bpc|bpb|reward"
)
_WITH_POINT = r"error|err|cer|map|precision|recall|score|r2|kl|dice|top[15]|reward|fid|f1"  # ordinary words, too
_BESIDE = (
    r"lr|learning_rate|grad_norm|gnorm|throughput|(?:samples|tokens|images|imgs?)(?:/s(?:ec)?|_per_s(?:ec(?:ond)?)?)"
)
_BEFORE = r"(?:[a-z0-9]{1,30}[_/.-]){0,4}"
_PARTS = r"train|val|valid|validation|test|eval|dev|cls|reg|box|mask|total|g|d"
_IS_MAIN = re.compile(rf"{_BEFORE}(?:{_MAIN}|{_WITH_POINT})(?:[@_]?[0-9]{{1,3}}|[_/](?:{_PARTS})){{0,2}}")
_IS_BESIDE = re.compile(rf"{_BEFORE}(?:{_BESIDE})")
_NEEDS_POINT = re.compile(rf"{_BEFORE}(?:{_WITH_POINT})[0-9@_]{{0,4}}")
_IS_SHARE = re.compile(rf"{_BEFORE}acc(?:uracy)?")
_STEPS = ("step", "global_step", "iter", "iteration", "it", "batch", "steps", "iters", "iterations")
_EPOCHS = ("epoch", "ep", "epochs")

_SPLITS = {"training": "train", "valid": "val", "validation": "val", "testing": "test", "evaluation": "eval"}
_SPLIT = r"train|training|val|valid|validation|test|testing|eval|evaluation|dev"
_PAIR = re.compile(
    rf"(?<![\w./@?&=-])(?:({_SPLIT})(?: set| avg\.?| average| mean)?[ :]{{1,2}})?"
    r"""["']?([A-Za-z][\w./@-]{0,63})["']?( ?[:=] ?[\[(]?| ?[\[(]| )"""
    r"(?:tensor\(|np\.float(?:16|32|64)\()?"
    rf"(?=({NUMBER}))\4(?:/([0-9]{{1,9}}))?(?![\w])(?![.:/-]\w)(?! ?[*+])(%?)",
    re.IGNORECASE,
)
_RATE = re.compile(r"(?<![\w.])([0-9]{1,12}(?:\.[0-9]{1,12})?) ?((?:samples|tokens|tok|images|imgs?)/s(?:ec)?)(?!\w)")
_PROGRESS = re.compile(r"(?<![\w/.:,-])([0-9]{1,9})/([0-9]{1,9})(?![\w/.,:-])")
_IN_BRACKETS = re.compile(r"\[ ?([0-9]{1,9}) ?\](?: ?\[ ?([0-9]{1,9}) ?/ ?([0-9]{1,9}) ?\])?")
_LAST_WORD = re.compile(r"(?<![A-Za-z])([A-Za-z]{1,20})[ :=]{0,3}$")
_HEAD = re.compile(rf"[^\w]{{0,8}}(?:on |the ){{0,2}}({_SPLIT})\b", re.IGNORECASE)
# One of these is in every line that matters; looking for them is quick.
_HINTS = (
    "loss", "acc", "epoch", "nll", "top", "perplexity", "ppl", "f1", "auc", "auroc", "mse", "mae", "mape", "wer",
    "bleu", "rouge", "iou", "dice", "psnr", "ssim", "fid", "elbo", "bpc", "bpb", "reward", "err", "cer", "map",
    "precision", "recall", "score", "r2", "kl", "ep ",
)  # fmt: skip
_MAX_CHARS = 2000  # of a line that somebody meant to be read
_TRACE = "Traceback (most recent call last)"


def number(text: str) -> int | float | str:
    """A number as metrics hold it: JSON has no NaN and no infinity, so those are words."""
    try:
        if len(text) < 19:
            return int(text)
    except ValueError:
        pass
    value = float(text)
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "Infinity" if value > 0 else "-Infinity"
    return value


@dataclass
class Words:
    """Reads one line after the other; remembers where in training the last one was."""

    epoch: float | None = None
    step: float | None = None  # the last one that a line told
    zero_based: bool = False  # epochs are counted from 0
    inner: float = 0  # the last step within its epoch
    base: float = 0  # steps of the epochs before
    base_epoch: float | None = None
    lines: int = 0
    in_trace: bool = False
    names: list[str] = field(default_factory=list)

    def read(self, line: str) -> tuple[float, dict[str, int | float | str]] | None:
        """The step and the values of a line (blanks collapsed, but for those it begins with); None if it has none."""
        if self.in_trace and line[:1] in (" ", ""):
            return None
        self.in_trace = _TRACE in line
        line = line.strip()
        lower = line.lower()
        if len(line) > _MAX_CHARS or not any(hint in lower for hint in _HINTS):
            return None
        main: dict[str, int | float | str] = {}
        beside: dict[str, int | float | str] = {}
        places: dict[str, tuple[float, int]] = {}
        for found in _PAIR.finditer(line):
            self._sort(line, found, main, beside, places)
        self._look_at(line, places)
        if "epoch" in places:
            self._begin(places["epoch"][0])
        if not main:
            return None
        for found in _RATE.finditer(line):
            beside.setdefault(found[2].lower(), number(found[1]))
        values = {name: value for name, value in {**main, **beside}.items() if self._knows(name)}
        if not values:
            return None
        step = self._step(places)
        self.lines += 1
        if "step" in places:
            self.step = step
        return step, values

    def _sort(
        self,
        line: str,
        found: re.Match[str],
        main: dict[str, int | float | str],
        beside: dict[str, int | float | str],
        places: dict[str, tuple[float, int]],
    ) -> None:
        split, key, between, text, total, percent = found.groups()
        name = key.lower().strip(".-/@")
        has_sign = between.strip(" [(") in (":", "=")
        has_point = not text.lstrip("+-").isdecimal()
        if name in _STEPS or name in _EPOCHS:
            place = "epoch" if name in _EPOCHS else "step"
            if text[0] in "0123456789." and place not in places:
                places[place] = (float(text), int(total or 0))
            return
        if "[" in between or ("(" in between and not has_sign):
            return
        kind = _kind(name)
        if kind == "beside":
            if not total:
                beside.setdefault(_named(name, split), number(text))
            return
        if not kind or line[: found.start(2)].rstrip().lower().endswith("packet"):
            return
        if total:
            if kind == "share" and text.isdecimal() and 0 < int(total) >= int(text):
                main.setdefault(_named(name, split or _head(line)), int(text) / int(total))
            return
        if (has_sign and kind != "doubtful") or has_point or (percent and kind == "share"):
            main.setdefault(_named(name, split or _head(line)), number(text))

    def _look_at(self, line: str, places: dict[str, tuple[float, int]]) -> None:
        """Steps that have no word before them: ``[12]`` where a line begins, ``Epoch: [3][10/500]``, ``12/100``."""
        if "epoch" in places and "step" not in places:
            for found in _IN_BRACKETS.finditer(line):
                if found[2]:
                    places["step"] = (float(found[2]), int(found[3]))
                    return
        if "step" in places:
            return
        for found in _PROGRESS.finditer(line):
            done, total = found.groups()
            is_date = (done[0] == "0" and len(done) > 1) and line[max(0, found.start() - 1)] not in "[("
            # What stands behind a word (`Epoch 3/10`, `accuracy: 90/100`) was taken there.
            word = _LAST_WORD.search(line, max(0, found.start() - 30), found.start())
            is_taken = word is not None and (word[1].lower() in _EPOCHS or bool(_kind(word[1].lower())))
            if int(done) <= int(total) and not is_date and not is_taken:
                places["step"] = (float(done), int(total))
                return
        if "epoch" not in places and (first := _IN_BRACKETS.match(line)) and not first[2]:
            places["step"] = (float(first[1]), 0)

    def _begin(self, epoch: float) -> None:
        self.zero_based = self.zero_based or epoch == 0
        self.epoch = epoch

    def _step(self, places: dict[str, tuple[float, int]]) -> float:
        if "step" not in places:
            if self.step is not None and (self.inner or self.epoch is None):
                return self.step  # of the line before, as where validation follows training
            return _plain(self.epoch) if self.epoch is not None else self.lines
        done, total = places["step"]
        if self.epoch is None:
            return _plain(done)
        if total:
            epochs = int(self.epoch) - (0 if self.zero_based else 1)
            self.inner = done
            return _plain(max(0, epochs) * total + done)
        # Steps that begin anew with each epoch go on behind those of the last.
        if self.base_epoch is not None and self.epoch > self.base_epoch and done < self.inner:
            self.base += self.inner
        self.base_epoch, self.inner = self.epoch, done
        return _plain(self.base + done)

    def _knows(self, name: str) -> bool:
        if name not in self.names:
            if len(self.names) >= MAX_NAMES or len(name) > _MAX_NAME:
                return False
            self.names.append(name)
        return True


@lru_cache(maxsize=1024)
def _kind(name: str) -> str:
    """What a word means: "share" (an accuracy), "sure", "doubtful" (an ordinary word, too), "beside"; or nothing."""
    if _IS_BESIDE.fullmatch(name):
        return "beside"
    if not _IS_MAIN.fullmatch(name):
        return ""
    if _IS_SHARE.fullmatch(name):
        return "share"
    return "doubtful" if _NEEDS_POINT.fullmatch(name) else "sure"


def _named(name: str, split: str | None) -> str:
    name = name.replace("@", "_")
    part = _SPLITS.get((split or "").lower(), (split or "").lower())
    return name if not part or name.startswith(part) else f"{part}_{name}"


def _head(line: str) -> str | None:
    """``Test set: average loss: 0.3`` is about the test set; training is what everything else is about."""
    found = _HEAD.match(line)
    return None if found is None or found[1].lower().startswith("train") else found[1]


def _plain(step: float) -> float:
    return int(step) if step == int(step) else step
