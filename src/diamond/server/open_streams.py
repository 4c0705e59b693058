"""How many live streams are open, and whose. Each holds a connection, a subscription and a look at the database now and
then for as long as its client likes, so nobody may have any number of them. One per process; used on its event loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from diamond.core.errors import RateLimited
from diamond.server.services.allowances import refusal


class OpenStreams:
    def __init__(self, *, per_user: int, total: int) -> None:
        self._per_user = per_user
        self._total = total
        self._open: Counter[str] = Counter()

    def check(self, user_id: str) -> None:
        """Raises RateLimited when this user, or the process, has no room for one more."""
        if self._open[user_id] >= self._per_user:
            have = f"you have {self._open[user_id]} live streams open already"
            raise refusal(RateLimited, have, "streams_per_user", cure="close some pages or `diamond logs -f`")
        if (have_all := self._open.total()) >= self._total:
            cure = "try again in a moment"
            raise refusal(RateLimited, f"{have_all} live streams are open here already", "max_streams", cure=cure)

    @contextmanager
    def one_more(self, user_id: str) -> Iterator[None]:
        """Around a stream. Checked again: between a request and its stream others may have begun."""
        self.check(user_id)
        self._open[user_id] += 1
        try:
            yield
        finally:
            self._open[user_id] -= 1
            if not self._open[user_id]:
                del self._open[user_id]
