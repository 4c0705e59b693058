"""Which parameters Muon takes, and which go to AdamW."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from diamond.optim.errors import OptimError
from diamond.optim.peers import Muon, make


class Reader(nn.Module):
    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 6)
        self.mix = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.hidden = nn.Linear(6, 6)
        self.head = nn.Linear(6, 11, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        mixed = self.mix(self.words(tokens).mT).mT
        found: torch.Tensor = self.head(torch.tanh(self.hidden(self.norm(mixed))))
        return found


def names(optimizer: torch.optim.Optimizer, *, muon: bool) -> set[str]:
    return {name for group in optimizer.param_groups if group["muon"] is muon for name in group["param_names"]}


def test_a_model_is_divided() -> None:
    optimizer = Muon(Reader(), 0.02, heads=["head"], adamw_lr=0.001, adamw_weight_decay=0.3)
    assert names(optimizer, muon=True) == {"mix.weight", "hidden.weight"}
    assert names(optimizer, muon=False) == {
        "words.weight",
        "mix.bias",
        "norm.weight",
        "norm.bias",
        "hidden.bias",
        "head.weight",
    }
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.02, 0.01), (0.001, 0.3)]


def test_without_a_name_the_head_is_a_matrix_and_tied_to_an_embedding_it_is_not() -> None:
    assert "head.weight" in names(Muon(Reader()), muon=True)
    tied = Muon(Reader(tied=True))
    assert names(tied, muon=True) == {"mix.weight", "hidden.weight"}
    assert "words.weight" in names(tied, muon=False)


def test_lists_pairs_and_groups_are_divided() -> None:
    model = Reader()
    plain = Muon(model.parameters())
    assert [len(group["params"]) for group in plain.param_groups] == [4, 4]
    pairs = Muon(model.named_parameters(), heads="words")
    assert "words.weight" in names(pairs, muon=False)
    groups: list[dict[str, Any]] = [
        {"params": list(model.hidden.parameters()), "lr": 0.5},
        {"params": model.words.weight, "muon": False},
        {"params": [model.head.weight], "muon": True, "momentum": 0.5},
    ]
    grouped = Muon(groups, 0.02, adamw_lr=0.001)
    found = [(group["muon"], group["lr"], group["momentum"]) for group in grouped.param_groups]
    assert found == [(True, 0.5, 0.95), (False, 0.5, 0.95), (False, 0.001, 0.95), (True, 0.02, 0.5)]


def test_a_head_that_is_not_there_is_an_error() -> None:
    with pytest.raises(OptimError, match="heads names lm_head, which no parameter is called"):
        Muon(Reader(), heads=["head", "lm_head"])
    with pytest.raises(OptimError, match="heads names head"):
        Muon(Reader().parameters(), heads=["head"])


def test_vectors_cannot_be_given_to_muon_and_later_groups_must_say() -> None:
    with pytest.raises(OptimError, match=r"parameter of shape \(3,\)"):
        Muon([{"params": [nn.Parameter(torch.ones(3))], "muon": True}])
    optimizer = Muon(nn.Linear(2, 2).parameters())
    with pytest.raises(OptimError, match='"muon" as True or False'):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "muon": False})
    assert [group["muon"] for group in optimizer.param_groups] == [True, False, False]


def test_matrices_of_one_shape_are_treated_as_if_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(3)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(5)))
        optimizer = make("muon", model, lr=0.1, precision="float32")
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
        return [param.detach() for param in model.parameters()]

    together = trained()
    monkeypatch.setattr("diamond.optim.peers.muon._MOST_STACKED", 33)  # two at once
    for mine, other in zip(together, trained(), strict=True):
        assert torch.allclose(mine, other, atol=1e-5)


def test_a_model_with_everything_learns() -> None:
    torch.manual_seed(1)
    model, tokens = Reader(), torch.randint(0, 11, (8, 12))
    optimizer = Muon(model, 0.02, heads=["head"], adamw_lr=0.01)
    losses = []
    for _ in range(100):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] > 2.0
    assert losses[-1] < 0.3
