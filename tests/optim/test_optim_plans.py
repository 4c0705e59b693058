"""`plan(model)`: printed readably, true of what K-FAC then does, and clear about what it cannot take."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from diamond.optim import KFAC, plan
from diamond.optim.errors import OptimError
from diamond.optim.hardware import COLLECTIVES, SOLVERS, Hardware
from diamond.optim.solvers import block_sizes

RANKS = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
import diamond.optim as do
from diamond.optim.measuring import measure
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
if rank == 1:  # a rank that is slower than the other, as one with a busy processor
    solve = torch.linalg.cholesky_ex
    torch.linalg.cholesky_ex = lambda stack: (time.sleep(0.04), solve(stack))[1]
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
made = do.plan(model, mesh=mesh, memory="8GiB", measure=0.4, inputs=torch.randn(8 + 8 * rank, 8))
timed = do.plan(model, mesh=mesh, measure=0.1, step_s=0.25 * (1 + rank), say=None)
print("SAME", made.owners, made.workers, made.factor_every, made.inverse_every, made.step_s, made.components)
print("ROWS", [one.positions for one in made.blocks], "STEP", timed.step_s)
print(measure("cpu", seconds=0.4, sizes=(16, 64)).to_json())
dist.destroy_process_group()
"""


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(20, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 5))


def pictures() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, 1, 1, groups=2),
        nn.ConvTranspose2d(8, 4, 2, 2), nn.Flatten(), nn.Linear(4 * 8 * 8, 3),
    )  # fmt: skip


def test_it_prints_time_memory_and_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    made = plan(network(), memory="8GiB", positions=64)
    text = capsys.readouterr().out
    assert text == made.explain() + "\n"
    assert text.startswith("K-FAC for 3 blocks on 1 rank (cpu (typical))")
    rows = {line[2:28].strip(): line[28:].split() for line in text.splitlines()[3:] if line.startswith("  ")}
    for name in ("preconditioning", "step lengths", "K-FAC in all", "training without it", "training with it"):
        assert float(rows[name][0]) > 0 and rows[name][1] == "ms" and rows[name][2].endswith("%")
    assert float(rows["training with it"][0]) == pytest.approx((made.step_s + made.kfac_s) * 1e3, abs=1e-3)
    assert rows["memory a rank, at most"][1] == "KiB" and rows["received a rank"] == ["0", "B"]
    assert max(map(len, text.splitlines())) < 111


def test_a_number_for_the_rate_takes_no_forward_passes() -> None:
    assert plan(network(), say=None).components.step_lengths > 0
    assert plan(network(), lr=0.1, say=None).components.step_lengths == 0
    long = plan(network(), inputs=torch.randn(64, 20), step_s=1e-5, factor_every=1, inverse_every=1, say=None)
    short = plan(network(), step_s=1e-5, factor_every=1, inverse_every=1, say=None)
    assert long.components.step_lengths > short.components.step_lengths, "what forward passes took, not what is usual"


def test_a_forward_pass_tells_how_many_rows_each_layer_sees() -> None:
    model = pictures()
    model[1].momentum = 0.5
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model[6].eval()
    made = plan(model, inputs=torch.randn(5, 2, 8, 8), say=None)
    rows = {one.name: one.positions for one in made.blocks}
    assert rows == {"0": 5 * 16, "1": 5 * 16, "3": 5 * 16, "4": 5 * 16, "6": 5}
    assert model.training and not model[6].training
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert [one.patches for one in made.blocks] == [True, False, True, True, False]
    words = nn.Sequential(nn.Embedding(30, 6), nn.Linear(6, 4))
    named = plan(words, inputs={"input": torch.randint(30, (7, 9))}, say=None)
    assert [one.positions for one in named.blocks] == [63, 63]
    several = plan(Two(), inputs=(torch.randn(4, 3), 2.0), say=None)
    assert [one.positions for one in several.blocks] == [8], "used twice"


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor, times: float) -> torch.Tensor:
        found: torch.Tensor = self.layer(self.layer(x) * times)
        return found


@pytest.mark.parametrize("given", [{"widest": 64}, {"largest": 50}])
def test_layers_larger_than_the_limit_are_split_and_kfac_does_what_was_predicted(given: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(150, 20), nn.Tanh(), nn.Linear(20, 90))
    [limit] = given.values()
    out = io.StringIO()
    made = plan(model, positions=32, say=out, **given)
    assert made.largest == limit and len(made.blocks) == 2
    assert f"dimensions above {limit} are split into blocks: as asked for" in out.getvalue()
    optimizer = KFAC(model, lr=0.1, plan=made)
    pieces = [(one.a_pieces, one.g_pieces) for one in optimizer.blocks]
    assert pieces == [(len(block_sizes(151, limit)), 1), (1, len(block_sizes(90, limit)))]
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(model(torch.randn(32, 150)), torch.randn(32, 90)).backward()
        optimizer.step()
    numbers = sum(
        len(block_sizes(n, limit)) * max(block_sizes(n, limit)) ** 2 for n in (151, 20, 21, 90)
    )  # fmt: skip
    held = optimizer.memory_bytes()
    assert held["factors"] == held["inverses"] == 4 * numbers
    assert 2 * 4 * numbers < made.memory_bytes < 5 * 4 * numbers, "these, a step's sums and the solver's copies"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory": "8 GB!"}, r"memory='8 GB!' is no size: give one such as \"8GiB\""),
        ({"memory": "1 KiB"}, r"memory='1 KiB' is too little for 3 blocks on 1 rank: at least \d+ bytes"),
        ({"mesh": "cuda"}, "mesh=str: give a DeviceMesh"),
        ({"mesh": 4}, "mesh=int: give a DeviceMesh"),
        ({"positions": 0}, "positions=0: give a whole number of 1 or more"),
        ({"lr": "fast"}, "lr='fast': give 'auto' or the number"),
        ({"lr": float("nan")}, "lr=nan"),
        ({"step_s": 0.0}, "step_s=0.0: give the seconds of a step"),
        ({"overhead": -1}, "overhead=-1"),
        ({"exclude": ["0", "2", "3"]}, r"model: no layer that K-FAC knows; see diamond.optim.coverage"),
        ({"widest": 0}, "widest=0: give a whole number of 1 or more"),
        ({"exclude": ["0", "heat"]}, "exclude: no module of the model is called 'heat'; there are 0, 1, 2, 3: see"),
        ({"exclude": "0"}, "exclude='0': give a list of names of modules"),
        ({"exclude": None}, "exclude=None: give a list of names of modules"),
        ({"step_s": "1"}, "step_s='1': give the seconds of a step, or None"),
        ({"overhead": None}, "overhead=None: give a part of the step"),
        ({"measure": "yes"}, "measure='yes': give True, or the seconds"),
        ({"lr": None}, "lr=None: give 'auto' or the number"),
        ({"say": "out"}, "say='out': give True, None for nowhere, or a file"),
        ({"inputs": torch.empty(0, 20)}, "inputs: it is an empty batch; give one as in training"),
        (
            {"inputs": torch.zeros(2, 7)},
            r"inputs: the model cannot be called with it \(mat1 and mat2 .*\); give a batch",
        ),
        ({"inputs": ()}, r"inputs: the model cannot be called with it \(.* missing 1 required .*\); give a batch"),
        ({"step_s": 0.0, "inputs": torch.zeros(2, 20)}, "step_s=0.0: give the seconds of a step"),
        ({"measure": -1.0}, "seconds=-1.0 is no time to measure"),
        ({"perios": 3}, "perios: plan has no such argument; one of mesh, memory, .*inverse_every"),
        ({"factor_dtype": "bfloat16"}, "factor_dtype: plan has no such argument"),
    ],
)
def test_bad_arguments_are_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(OptimError, match=said):
        plan(network(), **{"say": None, **given})


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_layers_without_numbers_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(0, 3), nn.LayerNorm(3), nn.Linear(3, 0))
    made = plan(model, inputs=torch.empty(5, 0), say=None)
    assert [(one.name, one.positions) for one in made.blocks] == [("0", 5), ("1", 5)]
    assert [block.name for block in KFAC(model, plan=made).blocks] == ["0", "1"]


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
        self.attention = nn.MultiheadAttention(4, 2)
        self.cell = nn.GRUCell(4, 4)
        self.same = self.decoder


@pytest.mark.parametrize(
    ("exclude", "said"),
    [
        (["decodr"], "is called 'decodr'; there are decoder, decoder.1, decoder.0: see"),
        (["0"], "is called '0'; there is decoder.0: see"),
        (["module.decoder"], "is called 'module.decoder'; there is decoder: see"),
        (["decoder.0.weight"], "is called 'decoder.0.weight'; there is decoder.0: see"),
        (
            ["cell", "", "x"],
            "is called '', 'x'; there are decoder, decoder.0, decoder.1, attention, .* and 4 more: see",
        ),
        (["same"], "is called 'same'"),  # the second name of a module says nothing to K-FAC
    ],
)
def test_a_name_that_fits_no_module_is_told_with_those_that_do(exclude: list[str], said: str) -> None:
    with pytest.raises(OptimError, match=said):
        KFAC(Nested(), exclude=exclude)
    with pytest.raises(OptimError, match=said):
        plan(Nested(), exclude=exclude, say=None)


def test_names_of_what_is_not_covered_anyway_and_of_parts_are_fine() -> None:
    optimizer = KFAC(torch.compile(Nested(), backend="eager"), exclude=("cell", "decoder.1", "attention.q", "decoder"))
    assert [block.name for block in optimizer.blocks] == ["attention.k", "attention.v", "attention.out_proj"]


@pytest.mark.parametrize(
    ("planned", "used", "said"),
    [
        ((), ("3",), "owners for 3 blocks, and this model has 2: 3 planned for, but not here or excluded; plan again"),
        (
            ("0", "2"),
            ("0",),
            "owners for 1 blocks, and this model has 2: 2 not planned for; plan again with this model",
        ),
        (("0",), ("3",), "has 2: 0 not planned for; 3 planned for, but not here or excluded; .* give the same exclude"),
    ],
)
def test_a_plan_of_other_blocks_is_refused_and_they_are_named(planned: Any, used: Any, said: str) -> None:
    made = plan(network(), exclude=planned, say=None)
    assert len(KFAC(network(), plan=made, exclude=planned).blocks) == len(made.blocks)
    with pytest.raises(OptimError, match=said):
        KFAC(network(), plan=made, exclude=used)


def test_a_plan_of_another_order_is_refused() -> None:
    made = plan(network(), say=None)
    turned = dataclasses.replace(made, blocks=made.blocks[::-1])
    with pytest.raises(OptimError, match="the same ones in another order; plan again"):
        KFAC(network(), plan=turned)


@pytest.mark.parametrize("model", [nn.Tanh(), nn.Sequential(nn.ReLU(), nn.Dropout())])
def test_a_model_without_layers(model: nn.Module) -> None:
    with pytest.raises(OptimError, match="model: no layer that K-FAC knows"):
        plan(model, say=None)


def test_what_is_no_model() -> None:
    with pytest.raises(OptimError, match=r"model=list: give the torch.nn.Module"):
        plan([nn.Linear(2, 2)], say=None)  # type: ignore[arg-type]


def test_two_ranks_of_a_mesh_measure_and_plan_alike(tmp_path: Path) -> None:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        told = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], told
    first, second = (out for out, _ in told)
    hardware = Hardware.from_json(second.splitlines()[-1])
    assert (
        hardware.world == 2 and set(hardware.collectives) == set(COLLECTIVES) and set(hardware.solvers) == set(SOLVERS)
    )
    assert all(bandwidth > 0 and latency >= 0 for latency, bandwidth in hardware.collectives.values())
    assert hardware.solve_s(16, "cholesky") >= 0.04 / 8, "the slowest rank's: 8 at once, and it sleeps before"
    assert first.startswith("K-FAC for 2 blocks on 2 ranks (cpu, measured)") and "K-FAC" not in second
    assert "received a rank" in first and "of 2 ranks precondition a block" in first
    assert first[first.index("SAME") :] == second
    assert "ROWS [16, 16] STEP 0.5" in second, "those of the rank with the larger batch, and of the slower one"
