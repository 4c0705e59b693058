"""Under which names this server answers, and the address that it puts into links."""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from starlette.requests import Request

from diamond.server.settings import Settings

_EVERYWHERE = ("", "0.0.0.0", "::")  # noqa: S104 - compared, not bound


def base_url(request: Request) -> str:
    """What links begin with, without a slash at the end: the operator's word; else how the request came here."""
    public: str = request.app.state.runtime.settings.public_url
    return (public or str(request.base_url)).rstrip("/")


def host_name(host: str) -> str:
    """``Example.org:8000`` without its port, in small letters."""
    name = host.partition("]")[0].lstrip("[") if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def is_loopback_name(name: str) -> bool:
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def plain_name(name: str) -> str:
    """A name or an address as it is compared: ``EXAMPLE.org.`` is ``example.org``, and ``[0:0::1]`` is ``::1``."""
    name = name.strip("[]").rstrip(".").lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        pass
    try:
        return name.encode("idna").decode() if not name.isascii() else name
    except UnicodeError:
        return name


class HostNames:
    """Attributes:
    is_strict: other names are refused. With many users, only once the operator said what this server is called.
    """

    def __init__(self, settings: Settings) -> None:
        given = [urlsplit(settings.public_url).hostname or "", *settings.allowed_names]
        self.is_strict = not settings.multi_user or any(given)
        if settings.host not in _EVERYWHERE:
            given.append(settings.host)
        self._names = {plain_name(name) for name in given} - {""}
        # Another machine's browser has no business with these names where nothing listens on them.
        self._is_local = not settings.multi_user or settings.host in _EVERYWHERE or is_loopback_name(settings.host)

    def knows(self, host: str) -> bool:
        """Whether a Host header, with or without a port, names this server."""
        name = plain_name(host_name(host))
        return name in self._names or (self._is_local and is_loopback_name(name))
