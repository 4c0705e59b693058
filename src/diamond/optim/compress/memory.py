"""What could not be sent yet, of every parameter, kept for the next step; and room that every step writes anew."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from diamond.optim.compress.codec import Layout
from diamond.optim.errors import OptimError


class Room:
    """Where to write, the same in every step: on a CPU fresh memory costs more than a product of thin matrices."""

    def __init__(self) -> None:
        self._by_names: dict[tuple[str, ...], torch.Tensor] = {}

    def like(self, flat: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Of that shape, with anything in it. A layout is on its way once at a time, and has one."""
        room = self._by_names.get(layout.names)
        if room is not None and room.shape == flat.shape and room.device == flat.device:
            return room
        moved = set(layout.names)
        self._by_names = {names: one for names, one in self._by_names.items() if moved.isdisjoint(names)}
        room = self._by_names[layout.names] = torch.empty_like(flat)
        return room


class ErrorMemory:
    """Errors by name, laid out as the buffers are in which gradients come.

    DDP puts its buckets together anew after the first step; then the errors move, none is lost.
    """

    def __init__(self) -> None:
        self._named: dict[str, torch.Tensor] = {}
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}

    def flat(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """The errors of a buffer, to be changed in place.

        Raises:
            OptimError: what was loaded is of another model.
        """
        known = self._flats.get(layout.names)
        if known is not None and known.numel() == layout.numel:
            return known
        flat = torch.zeros(layout.numel, device=device)
        for name, part in zip(layout.names, layout.split(flat), strict=True):
            if (old := self._named.get(name)) is not None:
                if old.numel() != part.numel():
                    raise OptimError(
                        f"the error memory of {name!r} holds {old.numel()} values, but {part.numel()} are sent; "
                        "load the state of the same model on as many ranks"
                    )
                part.copy_(old.view(-1))
            self._named[name] = part
        moved = set(layout.names)
        self._flats = {names: one for names, one in self._flats.items() if moved.isdisjoint(names)}
        self._flats[layout.names] = flat
        return flat

    def scale(self, factor: float) -> None:
        for one in self._named.values():
            one.mul_(factor)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {name: one.detach().clone() for name, one in self._named.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._named = {name: one.detach().clone().float() for name, one in state.items()}
        self._flats = {}
