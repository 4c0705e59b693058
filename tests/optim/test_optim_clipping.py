"""K-FAC in half precision, with clipped gradients, and where no step would lower the loss: it goes on, or says why."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from diamond.optim import KFAC, AdamW  # noqa: E402
from diamond.optim.keeping import load_sharded, sharded_state  # noqa: E402
from tests.optim.kfac_ranks import Net, batch, clipped_steps, weights  # noqa: E402
from tests.optim.test_optim_ranks import apart, run  # noqa: E402

VOCABULARY, CONTEXT = 48, 24


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """So small products are done faster by one, above all where others use the machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        number, length, width = x.shape
        q, k, v = self.qkv(self.before(x)).view(number, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(x.shape))
        down: Tensor = self.down(F.gelu(self.up(self.between(x))))
        return x + down


class Speaker(nn.Module):
    """A small GPT."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(CONTEXT, width)
        self.layers = Layer(width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words) + self.places(torch.arange(words.shape[1]))
        found: Tensor = self.head(self.norm(self.layers(x)))
        return found


def sentences(number: int = 8) -> Iterator[Tensor]:
    """Each word says most of the next one."""
    dice = torch.Generator().manual_seed(1)
    follows = torch.stack([torch.randperm(VOCABULARY, generator=dice) for _ in range(3)])
    while True:
        words = [torch.randint(VOCABULARY, (number,), generator=dice)]
        for _ in range(CONTEXT):
            which = torch.randint(5, (number,), generator=dice).clamp_max(2)
            words.append(follows[which, words[-1]])
        yield torch.stack(words, 1)


def backward(model: nn.Module, words: Tensor, half: bool = True, clip: float | None = None) -> float:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = F.cross_entropy(model(words[:, :-1]).float().flatten(0, 1), words[:, 1:].flatten())
    loss.backward()
    if clip is not None:
        nn.utils.clip_grad_norm_(model.parameters(), clip)
    return float(loss.detach())


def train(model: nn.Module, optimizer: Any, texts: Iterator[Tensor], steps: int, **options: Any) -> list[float]:
    found = []
    for _ in range(steps):
        found.append(backward(model, next(texts), **options))
        optimizer.step()
    return found


# ---- precision -------------------------------------------------------------------------------------------------------


def test_lengths_in_half_precision_are_those_of_single() -> None:
    """Also where most weights, by their size, have no part in the step: what counts is how far the step goes."""
    model, texts = Speaker(), sentences(16)
    torch.manual_seed(0)
    model.places = nn.Embedding(16_384, 32)
    with torch.no_grad():
        model.places.weight[CONTEXT:] *= 3
    optimizer = KFAC(model)
    for _ in range(2):
        train(model, optimizer, texts, 5, half=False)
        words, found = next(texts), []
        for half in (False, True):
            twin, measuring = copy.deepcopy((model, optimizer))
            measuring._lengths_at = 0
            measuring._curving.disarm()
            measuring._curving.arm(again=True)
            backward(twin, words, half)
            measuring.step()
            found.append(measuring.lengths)
        single, halves = found
        assert 0.5 < halves.step / single.step < 2
        assert halves.ratio == pytest.approx(single.ratio, abs=0.3)


def test_a_step_inside_autocast_is_the_step_outside() -> None:
    found = []
    for inside in (False, True):
        model, texts = Speaker(), sentences()
        optimizer = KFAC(model)
        for _ in range(4):
            backward(model, next(texts))
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                optimizer.step()
        found.append(torch.cat([one.detach().flatten() for one in model.parameters()]))
    assert torch.equal(*found)


# ---- clipping --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("half", [True, False], ids=["bf16", "fp32"])
def test_gradients_clipped_to_next_to_nothing_still_train(half: bool) -> None:
    model, texts = Speaker(), sentences(16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses = train(model, KFAC(model), texts, 40, half=half, clip=0.002)
    assert sum(losses[-5:]) / 5 < losses[0] - 2


def test_clipping_changes_neither_lengths_nor_curvature() -> None:
    """Of the first step, where nothing else can differ."""
    found = []
    for clip in (None, 0.01):
        model = Speaker()
        optimizer = KFAC(model)
        train(model, optimizer, sentences(), 1, half=False, clip=clip)
        found.append((optimizer.lengths, float(optimizer._along)))
    (free, along), (clipped, along_clipped) = found
    assert clipped.step == pytest.approx(free.step, rel=1e-3)
    assert clipped.ratio == pytest.approx(free.ratio, rel=1e-2)
    assert along_clipped == pytest.approx(along, rel=1e-3)


def test_clipping_changes_no_step_of_a_batch_that_comes_again(tmp_path: Path) -> None:
    """On one process and two, in one piece and in two."""
    run(tmp_path, 2, ["clipped_steps"])
    ranks = [torch.load(tmp_path / f"clipped_steps.2.{rank}.pt") for rank in range(2)]
    begin = weights(Net())
    for found in (clipped_steps(), *ranks):
        for pieces in (1, 2):
            free, clipped = found[f"{pieces} None"], found[f"{pieces} 0.02"]
            assert apart(free, begin) > 0.1
            assert apart(clipped, free) < 0.02 * apart(free, begin)
    assert all(torch.equal(ranks[0][name], ranks[1][name]) for name in ranks[0])


def test_small_and_noisy_batches_do_not_diverge_where_gradients_are_clipped() -> None:
    """What clipping keeps from harm stays so: steps are cut back, at most to what clipping makes of them."""
    model, texts = Speaker(), sentences(2)
    optimizer = KFAC(model)
    brakes = []
    losses = []
    for _ in range(40):
        losses += train(model, optimizer, texts, 1, clip=0.1)
        brakes.append(1.0 if optimizer._brake is None else float(optimizer._brake))
    assert 0.01 < min(brakes) < 0.5
    assert max(losses) < losses[0] + 1.5
    assert sum(losses[-10:]) / 10 < losses[0] - 0.5


# ---- periods ---------------------------------------------------------------------------------------------------------


def test_periods_are_kept_where_batches_differ() -> None:
    """Small and large ones by turns, so that lengths never stay the same."""
    model, small, large = Speaker(), sentences(1), sentences(32)
    optimizer = KFAC(model)
    looked, measured, inverted = 0, 0, 0
    for step in range(40):
        before = optimizer._lengths_at, optimizer._inverses_at
        looked += optimizer._curving.armed
        train(model, optimizer, large if step % 2 else small, 1, half=False)
        measured += optimizer._lengths_at != before[0]
        inverted += optimizer._inverses_at != before[1]
    assert 8 <= looked <= 20
    assert 4 <= measured <= looked
    assert 4 <= inverted <= looked


# ---- where no length lowers the loss ---------------------------------------------------------------------------------


class Fickle(Speaker):
    """Answers otherwise when it is asked again without gradients, as K-FAC does to find out how far to go."""

    shift = 0.0

    def forward(self, words: Tensor) -> Tensor:
        found = super().forward(words)
        if self.shift and not torch.is_grad_enabled():
            found = found + torch.linspace(-self.shift, self.shift, VOCABULARY)
        return found


def test_where_no_length_is_found_the_fallback_steps_and_says_so() -> None:
    model, texts = Fickle(), sentences()
    optimizer = KFAC(model, fallback=AdamW(lr=1e-2))
    train(model, optimizer, texts, 5, half=False)
    assert optimizer.lengths.step > 0
    model.shift = 20.0
    highest = optimizer.damping
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(40):
            train(model, optimizer, texts, 1, half=False)
            highest = max(highest, optimizer.damping)
            if said:
                break
    assert "no length of a step that lowers the loss, 3 times in a row; AdamW, the fallback" in str(said[0].message)
    assert highest > optimizer.damping == 1e-4
    assert optimizer.lengths.step == 0
    before = weights(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # said once
        train(model, optimizer, texts, 1, half=False)
    moved = (weights(model) - before).abs()
    assert 0.005 < float(moved.median()) <= float(moved.max()) < 0.02
    model.shift = 0.0
    losses = train(model, optimizer, texts, 25, half=False)
    assert optimizer._stuck == 0
    assert optimizer.lengths.step > 0
    assert losses[-1] < losses[0]


# ---- what is kept ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("road", ["state_dict", "sharded_state"])
def test_states_from_before_clipping_was_watched_still_load(road: str) -> None:
    model = Net()
    optimizer = KFAC(model)
    for step in range(4):
        clipped_step(model, optimizer, step)
    state: Any = optimizer.state_dict() if road == "state_dict" else sharded_state(optimizer)
    state = copy.deepcopy(state)
    resumed = KFAC(copy.deepcopy(model))
    if road == "state_dict":
        numbers = state["kfac"]["numbers"]
        for later in ("stuck", "watched", "brake"):
            del numbers[later]
        resumed.load_state_dict(state)
    else:
        about = json.loads(state["about"])
        for later in ("stuck", "watched", "brake"):
            del about["numbers"][later]
        load_sharded(resumed, {**state, "about": json.dumps(about)})
    assert resumed.steps == 4
    assert resumed.lengths == optimizer.lengths
    assert (resumed._stuck, resumed._watch.on, resumed._brake) == (0, False, None)
    clipped_step(resumed.root, resumed, 4)


@pytest.mark.parametrize("road", ["state_dict", "sharded_state"])
def test_what_clipping_is_known_to_do_is_kept(road: str) -> None:
    """A run that goes on is the run without a break."""
    model = Net()
    optimizer = KFAC(model)
    for step in range(4):
        clipped_step(model, optimizer, step)
    assert optimizer._watch.on
    twin = copy.deepcopy(model)
    resumed = KFAC(twin)
    if road == "state_dict":
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    else:
        load_sharded(resumed, copy.deepcopy(sharded_state(optimizer)))
    for step in range(4, 12):
        clipped_step(model, optimizer, step)
        clipped_step(twin, resumed, step)
    assert torch.equal(weights(twin), weights(model))


def clipped_step(model: nn.Module, optimizer: KFAC, step: int) -> None:
    x, y = batch(step)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
