"""What others need to know to be sure of this server. How its certificates are made is the business of
`diamond.server.tls`, which loads a cryptography library and is imported only where HTTPS is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diamond.core.errors import InstallationProblem
from diamond.core.tls import pin_of
from diamond.server.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Trust:
    """Empty for plain HTTP and for authorities every system knows."""

    ca_pem: str = ""
    names: tuple[str, ...] = ()

    @property
    def pin(self) -> str:
        return pin_of(self.ca_pem) if self.ca_pem else ""


@dataclass(frozen=True, kw_only=True)
class Certificates:
    """Files the listener uses. `ca` is for clients of this home; None when the system's authorities will do."""

    cert: Path
    key: Path
    ca: Path | None
    names: tuple[str, ...] = ()


def certificates_for(settings: Settings, *, now: float) -> Certificates | None:
    """The certificate to listen with, made or renewed as need be; None for plain HTTP."""
    if not settings.has_tls:
        return None
    from diamond.server import tls

    return tls.prepare(settings, now=now)


def trust_of(settings: Settings, certificates: Certificates | None) -> Trust:
    """What to tell agents. A proxy in front may have an authority of its own (`tls_ca`)."""
    if certificates is not None and certificates.ca is not None:
        return Trust(ca_pem=read_text(certificates.ca, "tls_ca"), names=certificates.names)
    return Trust(ca_pem=read_text(Path(settings.tls_ca), "tls_ca")) if settings.tls_ca else Trust()


def read_text(path: Path, setting: str) -> str:
    """A file an operator named in a setting. Raises InstallationProblem, naming the setting."""
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise InstallationProblem(
            f"setting {setting}: {path} cannot be read: {error}",
            hint=f"mend or unset DIAMOND_{setting.upper()}",
            field=setting,
        ) from error
