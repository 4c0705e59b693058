"""Every kind of layer: its rows against the gradient that autograd finds, its factors against brute force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from diamond.optim.blocks import EMBEDDING, NORM, discover
from diamond.optim.capture import Capture
from diamond.optim.errors import OptimError
from diamond.optim.kfac import KFAC, AdamW
from diamond.optim.losses import first_tensor
from diamond.optim.uses import Use, input_rows, norm_squares, output_rows, vocabulary_sums
from tests.optim.curved import close, factors_of, no_modes

_ = pytest.fixture(autouse=True)(no_modes)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")  # torch's advice on speed


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


class Attention(nn.Module):
    def __init__(self, cross: bool = False, weights: bool = False, mask: bool = False, **options: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, **options)
        self.cross, self.weights, self.mask = cross, weights, mask
        sizes = (self.attention.kdim, self.attention.vdim)
        self.other = tuple(torch.randn(5, 4, size) for size in sizes) if cross else ()

    def forward(self, x: Tensor) -> Tensor:
        if self.attention.batch_first:
            x = x.transpose(0, 1)
        keys, values = self.other or (x, x)
        mask = torch.triu(torch.full((len(x), len(x)), -torch.inf), 1) if self.mask else None
        if self.other and self.attention.kdim == self.attention.vdim:
            values = keys
        found: Tensor = self.attention(x, keys, values, need_weights=self.weights, attn_mask=mask)[0]
        return found


class Fused(nn.Module):
    """One linear layer for queries, keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        found: Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return found


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layer(torch.tanh(self.layer(x)))
        return found


class SharedWeight(nn.Module):
    """Two modules, one weight, biases of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.two(torch.tanh(self.one(x)))
        return found


class Experts(nn.Module):
    """Some samples go here, others there, none to the third."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.arange(len(x)) % 2
        out = x.new_zeros(len(x), 3)
        for place, expert in enumerate(self.experts):
            out = out.index_add(0, (chosen == place).nonzero()[:, 0], expert(x[chosen == place]))
        return out


class Adapter(nn.Module):
    """LoRA: the base is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.down, self.up = nn.Linear(4, 3), nn.Linear(4, 2, bias=False), nn.Linear(2, 3, bias=False)
        self.base.requires_grad_(requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x) + self.up(self.down(x))
        return found


def image(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def net(layer: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(layer(), nn.Tanh())


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (net(lambda: nn.Linear(4, 3)), image(5, 4)),
    "linear over positions": (net(lambda: nn.Linear(4, 3)), image(5, 6, 4)),
    "linear without bias": (net(lambda: nn.Linear(4, 3, bias=False)), image(5, 4)),
    "conv1": (net(lambda: nn.Conv1d(2, 3, 3, stride=2, padding=1)), image(5, 2, 9)),
    "conv2": (net(lambda: nn.Conv2d(2, 3, (3, 2), stride=(2, 1), padding=(1, 0))), image(4, 2, 7, 6)),
    "conv2 same": (net(lambda: nn.Conv2d(2, 3, 4, padding="same", dilation=(1, 2))), image(4, 2, 7, 6)),
    "conv2 valid": (net(lambda: nn.Conv2d(2, 3, 3, padding="valid", dilation=2)), image(4, 2, 7, 8)),
    "conv2 groups": (net(lambda: nn.Conv2d(4, 6, 3, groups=2)), image(4, 4, 5, 5)),
    "conv2 depthwise": (net(lambda: nn.Conv2d(4, 8, 3, groups=4, bias=False)), image(4, 4, 5, 5)),
    "conv2 circular": (net(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")), image(4, 2, 5, 5)),
    "conv2 reflect": (net(lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect")), image(4, 2, 5, 5)),
    "conv2 channels_last": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh()).to(memory_format=torch.channels_last),
        lambda: torch.randn(4, 2, 5, 6).to(memory_format=torch.channels_last),
    ),
    "conv2 of one image": (net(lambda: nn.Conv2d(2, 3, 3)), image(2, 5, 6)),
    "conv3": (net(lambda: nn.Conv3d(2, 3, (2, 3, 2), padding=(1, 0, 1), stride=(1, 2, 1))), image(3, 2, 4, 5, 4)),
    "transposed1": (net(lambda: nn.ConvTranspose1d(2, 3, 3, stride=2, padding=1)), image(5, 2, 6)),
    "transposed2": (
        net(lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2, dilation=2)),
        image(4, 4, 3, 4),
    ),
    "transposed2 padded": (
        net(lambda: nn.ConvTranspose2d(2, 3, 2, stride=1, output_padding=1, dilation=2)),
        image(4, 2, 3, 4),
    ),
    "transposed3": (net(lambda: nn.ConvTranspose3d(2, 3, 2, stride=2, bias=False)), image(3, 2, 2, 3, 2)),
    "attention": (Attention, image(5, 4, 8)),
    "attention weights": (lambda: Attention(weights=True, batch_first=True), image(4, 5, 8)),
    "attention masked": (lambda: Attention(mask=True, bias=False), image(5, 4, 8)),
    "attention cross": (lambda: Attention(cross=True), image(3, 4, 8)),
    "attention widths": (lambda: Attention(cross=True, kdim=6, vdim=7), image(3, 4, 8)),
    "fused": (Fused, image(5, 6, 8)),
    "twice": (Twice, image(5, 4)),
    "shared weight": (SharedWeight, image(5, 4)),
    "experts": (Experts, image(6, 4)),
    "adapter": (Adapter, image(5, 4)),
    "gpt2": (net(lambda: Conv1D(3, 4)), image(5, 6, 4)),
}


def seen(model: nn.Module, x: Tensor) -> tuple[list[Use], Tensor]:
    capture = Capture(discover(model), None)
    capture.begin(model)
    try:
        out = first_tensor(model(x))
    finally:
        capture.leave()
    return capture.uses, out


def gradients(uses: list[Use], out: Tensor, direction: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(out, [use.edge for use in uses], direction, retain_graph=True))


@pytest.mark.parametrize("name", LAYERS)
def test_rows_add_up_to_the_gradient(name: str) -> None:
    make, inputs = LAYERS[name]
    model = make()
    uses, out = seen(model, inputs())
    direction = torch.randn_like(out)
    sums: dict[int, Tensor] = {}
    for use, gradient in zip(uses, gradients(uses, out, direction), strict=True):
        rows = output_rows(use, gradient, "expand").transpose(1, 2) @ input_rows(use, "expand")
        sums[use.block.index] = sums.get(use.block.index, torch.zeros(())) + rows
    out.backward(direction)
    used = {use.block.index: use.block for use in uses}
    assert used
    for block in used.values():
        bias = None if block.bias is None else block.bias.grad
        assert block.weight.grad is not None
        assert sums[block.index].shape == (block.copies, block.g, block.a)
        close(sums[block.index], block.matrix(block.weight.grad, bias), 1e-5)


@pytest.mark.parametrize("name", LAYERS)
def test_a_matrix_goes_back_to_where_it_came_from(name: str) -> None:
    model = LAYERS[name][0]()
    wanted = {id(one): torch.randn_like(one) for one in model.parameters()}
    written = {key: torch.zeros_like(one) for key, one in wanted.items()}
    blocks = discover(model)
    for block in blocks:
        bias = block.bias
        matrix = block.matrix(wanted[id(block.weight)], None if bias is None else wanted[id(bias)])
        assert matrix.shape == (block.copies, block.g, block.a)
        for one, part in zip((block.weight, bias), block.views(matrix), strict=True):
            assert (one is None) == (part is None)
            if one is not None and part is not None:
                assert part.untyped_storage().data_ptr() == matrix.untyped_storage().data_ptr(), "no copy"
                block.seen(written[id(one)]).copy_(part)
    for one in (one for block in blocks for one in block.parameters()):
        assert torch.equal(written[id(one)], wanted[id(one)])


@pytest.mark.parametrize("name", [*LAYERS, "embedding", "tied", "norms"])
def test_a_step_changes_all_that_was_used_and_lowers_the_loss(name: str) -> None:
    make, inputs = {**LAYERS, **OTHERS}[name]
    model, x = make(), inputs()
    model.eval()
    with torch.no_grad():
        y = torch.randn_like(model(x)) * 0.3
    model.train()
    opt = KFAC(model, lr=0.05, momentum=0.0, curvature="ggn-exact", fallback=AdamW(lr=1e-4, weight_decay=0.0))
    before = {key: one.detach().clone() for key, one in model.named_parameters()}
    losses = []
    for _round in range(4):
        opt.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for key, one in model.named_parameters():
        unused = one.grad is None or not bool(one.grad.any())
        assert torch.equal(one, before[key]) == unused, key


@pytest.mark.parametrize("name", [name for name in LAYERS if name.startswith("conv")])
def test_inputs_of_convolutions_are_the_derivative_by_the_weight(name: str) -> None:
    make, inputs = LAYERS[name]
    model, x = make(), inputs()
    layer = model[0]  # type: ignore[index]
    (use,), _ = seen(model, x)
    found = input_rows(use, "expand")
    x = x if x.dim() == layer.weight.dim() else x[None]

    def output(weight: Tensor) -> Tensor:
        return torch.func.functional_call(layer, {"weight": weight}, (x,)).flatten(2)

    slope = torch.func.jacrev(output)(layer.weight.detach())  # sample, output, position, output, input, window
    size = layer.out_channels // layer.groups
    for copy in range(layer.groups):
        rows = slope[:, copy * size, :, copy * size].flatten(2).reshape(-1, found.shape[2] - (layer.bias is not None))
        wanted = torch.cat([rows, torch.ones(len(rows), 1)], 1) if layer.bias is not None else rows
        close(found[copy], wanted, 1e-6)


def test_the_factors_have_the_partial_traces_of_both_kinds_of_uses() -> None:
    """With the bias and without: two Kronecker products, of means of inputs and of sums over gradients."""
    model, x, y = SharedWeight(), torch.randn(5, 4), torch.randn(5, 4)
    a, g = factors_of(model, x, lambda out: F.mse_loss(out, y))["one"]
    hidden = torch.tanh(model.one(x)).detach()
    one, two = torch.cat([x, torch.ones(5, 1)], 1), torch.cat([hidden, torch.zeros(5, 1)], 1)
    through = torch.einsum("od,nd->nod", model.two.weight.detach(), 1 - hidden.square())  # by the first's output
    first = one.T @ one / 5, 2 * torch.einsum("nod,noe->de", through, through) / 20
    second = two.T @ two / 5, 2 * 5 * torch.eye(4) / 20
    assert g is not None
    close(a[0] * g[0].trace(), sum(inputs * outputs.trace() for inputs, outputs in (first, second)), 1e-5)
    close(g[0] * a[0].trace(), sum(outputs * inputs.trace() for inputs, outputs in (first, second)), 1e-5)


def test_experts_have_the_curvature_of_their_own_samples() -> None:
    model, x, y = Experts(), torch.randn(6, 4), torch.randn(6, 3)
    found = factors_of(model, x, lambda out: F.mse_loss(out, y))
    assert set(found) == {"experts.0", "experts.1"}
    a, g = found["experts.1"]
    own = torch.cat([x[1::2], torch.ones(3, 1)], 1)
    assert g is not None
    close(a[0], own.T @ own / 3, 1e-5)
    close(g[0], 2 * torch.eye(3) * 3 / 18, 1e-5)


def test_weights_that_are_computed_are_left_to_the_fallback() -> None:
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Linear(3, 2))
    assert [block.name for block in discover(model)] == ["1"]
    with pytest.raises(OptimError, match="model: 0 has no shape yet"):
        discover(nn.Sequential(nn.LazyLinear(3)))


def test_scores_by_a_product_with_the_table() -> None:
    class Product(Words):
        def forward(self, words: Tensor) -> Tensor:
            return torch.tanh(self.norm(self.table(words))) @ self.table.weight.T

    model, words = Words(tied=True, padding=None), torch.randint(0, 9, (4, 3))
    product = Product(tied=True, padding=None)
    product.load_state_dict(model.state_dict())
    found = [
        factors_of(one, words, lambda out: F.cross_entropy(out.flatten(0, 1), words.flatten()))["table"]
        for one in (model, product)
    ]
    assert found[0][1] is not None and found[1][1] is not None
    close(found[1][0], found[0][0], 1e-5)
    close(found[1][1], found[0][1], 1e-5)


def test_an_adapter_leaves_its_base_alone() -> None:
    assert [block.name for block in discover(Adapter())] == ["down", "up"]


def test_parameters_of_ones_own_are_left_to_the_fallback() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.layer = nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.layer(F.linear(x, self.weight))
            return found

    assert [block.name for block in discover(Own())] == ["layer"]


class Words(nn.Module):
    def __init__(self, tied: bool, padding: int | None = 0) -> None:
        super().__init__()
        self.head = nn.Linear(5, 9, bias=not tied)
        self.table, self.norm = nn.Embedding(9, 5, padding_idx=padding), nn.LayerNorm(5)
        if tied:
            self.table.weight = self.head.weight

    def forward(self, words: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.norm(self.table(words))))
        return found


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.norms = nn.Sequential(
            nn.BatchNorm2d(4), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.LayerNorm([4, 3, 3]),
            nn.RMSNorm(3),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = torch.tanh(self.norms(self.first(x)))
        return found


OTHERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "embedding": (lambda: Words(tied=False), lambda: torch.randint(0, 9, (6, 7))),
    "tied": (lambda: Words(tied=True, padding=None), lambda: torch.randint(0, 9, (6, 7))),
    "norms": (Norms, image(5, 3, 5, 5)),
}


def test_words_have_a_diagonal_and_padding_does_not_count() -> None:
    model, words = Words(tied=False), torch.tensor([[0, 1, 2], [2, 2, 0]])
    uses, out = seen(model, words)
    use = next(use for use in uses if use.block.kind == EMBEDDING)
    (gradient,) = torch.autograd.grad(out, [use.edge], torch.randn_like(out))
    diagonal, square = vocabulary_sums(use, gradient)
    real = gradient[words != 0]
    close(square, real.T @ real, 1e-6)
    close(diagonal / diagonal.sum(), torch.tensor([0.0, 1, 3, 0, 0, 0, 0, 0, 0]) / 4, 1e-6)


def test_a_table_that_also_scores_keeps_both_partial_traces() -> None:
    """Against the two Kronecker products themselves, written out."""
    model, words = Words(tied=True, padding=None), torch.randint(0, 9, (4, 3))
    y = torch.randint(0, 9, (4, 3))
    assert [(block.name, block.kind) for block in discover(model)] == [("table", EMBEDDING), ("norm", NORM)]
    a, g = factors_of(model, words, lambda out: F.cross_entropy(out.flatten(0, 1), y.flatten()))["table"]
    looked_up = model.table(words).detach().requires_grad_()
    hidden = torch.tanh(model.norm(looked_up))
    logits = F.linear(hidden, model.head.weight.detach())
    p = logits.detach().softmax(-1)
    curved = torch.diag_embed(p) - p[..., :, None] * p[..., None, :]
    by_lookup = torch.stack(
        [torch.stack([torch.autograd.grad(logits[n, t, c], looked_up, retain_graph=True)[0][n, t] for c in range(9)])
         for n in range(4) for t in range(3)]
    ).reshape(4, 3, 9, 5)  # fmt: skip
    g_lookup = torch.einsum("ntcd,ntce,ntef->df", by_lookup, curved, by_lookup) / 12
    a_lookup = torch.bincount(words.flatten(), minlength=9) / 12
    g_head = torch.einsum("ntd,nte->de", hidden, hidden).detach() / 12
    a_head = torch.einsum("ntcc->c", curved) / 12
    whole = torch.kron(g_lookup, torch.diag(a_lookup)) + torch.kron(g_head, torch.diag(a_head))
    assert g is not None
    ours = torch.kron(g[0], torch.diag(a[0])).reshape(5, 9, 5, 9)
    whole = whole.reshape(5, 9, 5, 9)
    close(torch.einsum("iajb,ij->ab", ours, torch.eye(5)), torch.einsum("iaib->ab", whole))
    close(torch.einsum("iaja->ij", ours), torch.einsum("iaja->ij", whole))


NORMS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "layer": (lambda: nn.LayerNorm(4), (5, 6, 4)),
    "layer of two": (lambda: nn.LayerNorm([3, 4]), (5, 3, 4)),
    "layer without bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "rms": (lambda: nn.RMSNorm(4), (5, 6, 4)),
    "group": (lambda: nn.GroupNorm(2, 4), (5, 4, 6)),
    "batch": (lambda: nn.BatchNorm1d(4), (5, 4)),
    "batch2": (lambda: nn.BatchNorm2d(4), (5, 4, 3, 3)),
    "batch at rest": (lambda: nn.BatchNorm2d(4).eval(), (5, 4, 3, 3)),
    "instance": (lambda: nn.InstanceNorm2d(4, affine=True), (5, 4, 3, 3)),
    "instance at rest": (lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True).eval(), (5, 4, 6)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_have_the_squares_of_single_samples(name: str) -> None:
    make, shape = NORMS[name]
    model, x = make(), torch.randn(shape)
    for one in model.parameters():
        nn.init.normal_(one)
    (use,), out = seen(model, x)
    direction = torch.randn_like(out)
    (gradient,) = gradients([use], out, direction)
    buffers = {key: one.clone() for key, one in model.named_buffers()}

    def output(parameters: dict[str, Tensor]) -> Tensor:
        found: Tensor = torch.func.functional_call(
            model, {**parameters, **{key: one.clone() for key, one in buffers.items()}}, (x,)
        )
        return found

    slopes = torch.func.jacrev(output)({key: one.detach() for key, one in model.named_parameters()})
    parts = []
    for slope in slopes.values():
        own = (slope.flatten(x.dim()) * direction[..., None]).flatten(1, x.dim() - 1).sum(1)  # sample, parameter
        parts.append(own.square().sum(0))
    close(norm_squares(use, gradient), torch.cat(parts), 1e-5)
