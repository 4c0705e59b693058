"""Exchanges among ranks that exist in this process alone: to see what a way to compress does, without a network."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from diamond.optim.compress.codec import Rebuilt, Rounds, Send


def in_lockstep(ranks: Sequence[Rounds]) -> tuple[list[Rebuilt], list[list[Send]]]:
    """Carry the rounds of all ranks. What each ends with, and what each sent in every round."""
    answers: list[torch.Tensor | None] = [None] * len(ranks)
    ends: list[Rebuilt] = []
    sent: list[list[Send]] = []
    while not ends:
        round_: list[Send] = []
        for rounds, answer in zip(ranks, answers, strict=True):
            try:
                send = rounds.send(answer)  # type: ignore[arg-type]
                # What is handed over may be a view of what the rank goes on with.
                round_.append(Send(send.how, send.tensor.clone()))
            except StopIteration as end:
                ends.append(end.value)
        if round_:
            assert not ends, "all ranks must send in every round"
            sent.append(round_)
            answers = list(_carried(round_))
    return ends, sent


def _carried(round_: list[Send]) -> list[torch.Tensor]:
    tensors = [send.tensor for send in round_]
    if round_[0].how == "sum":
        total = torch.stack(tensors).sum(0)
        return [total.clone() for _ in tensors]
    if round_[0].how == "gather":
        return [torch.stack(tensors) for _ in tensors]
    return [torch.stack([one[rank] for one in tensors]) for rank in range(len(tensors))]
