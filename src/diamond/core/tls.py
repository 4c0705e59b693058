"""TLS as clients and agents use it: whom to trust, how a private authority is pinned, and what a failure means.

A server with its own private authority is trusted by that authority's certificate alone: the enrolment line carries
its SHA-256 (the *pin*), so that nobody between the two can put another in its place. Names are checked all the same.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import ssl
from pathlib import Path
from urllib.parse import urlsplit

from diamond.core.errors import InstallationProblem, InvalidInput

# Ours, or what `openssl x509 -fingerprint -sha256` prints: with colons, and words in front.
_PIN = re.compile(r"(?i:sha256:|sha256 fingerprint=)?([0-9a-fA-F]{64}|[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){31})")
_END = "-----END CERTIFICATE-----"
# OpenSSL's numbers of verification failures: X509_V_ERR_…
_NOT_YET_VALID, _EXPIRED = 9, 10
_UNKNOWN_AUTHORITY = (2, 18, 19, 20, 21)
_WRONG_NAME = (62, 64)


def pin_of(pem: str) -> str:
    """How a certificate is named in an enrolment line: ``sha256:`` and the digest of its DER form."""
    return "sha256:" + hashlib.sha256(ssl.PEM_cert_to_DER_cert(first_certificate(pem))).hexdigest()


def parse_pin(text: str) -> str:
    """A pin as `pin_of` writes it. Raises InvalidInput for anything else."""
    found = _PIN.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(
            f"{text[:80]!r} is not a pin",
            hint="it is sha256: and 64 hex digits, as the server says when it starts and the line of `diamond endpoint "
            "enroll` has it; what `openssl x509 -noout -fingerprint -sha256` prints will do too",
            field="--pin",
        )
    return "sha256:" + found[1].lower().replace(":", "")


def check_pin(pem: str, pin: str) -> None:
    """Raises InstallationProblem unless `pem` is the certificate that was pinned."""
    try:
        found = pin_of(pem)
    except ValueError as error:
        raise InstallationProblem("the server's authority is not a certificate") from error
    if not hmac.compare_digest(found, parse_pin(pin)):
        raise InstallationProblem(
            f"the server's authority is {found}, not the one pinned ({parse_pin(pin)})",
            hint="somebody may be listening in between, or the server was set up anew; get a new line with "
            "`diamond endpoint enroll NAME` from somebody who can reach the server safely",
            field="--pin",
        )


def first_certificate(pem: str) -> str:
    """The first certificate of a file that may hold several. Raises ValueError when there is none."""
    head, found, _ = pem.partition(_END)
    if not found:
        raise ValueError("no certificate")
    return head[head.index("-----BEGIN CERTIFICATE-----") :] + found + "\n"


def client_context(ca_file: Path | str | None, *, ca_pem: str | None = None) -> ssl.SSLContext:
    """A context that checks chain and name. With `ca_file` (or its text) it trusts that authority and no other.

    Raises:
        InstallationProblem: the file cannot be read or holds no certificate.
    """
    if not ca_file and not ca_pem:
        return ssl.create_default_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cafile=str(ca_file) if ca_file else None, cadata=ca_pem)
    except (OSError, ssl.SSLError) as error:
        raise InstallationProblem(
            f"the authority's certificate {ca_file} cannot be used: {error}",
            hint="enrol anew, or name another with DIAMOND_CA",
        ) from error
    return context


def blind_context() -> ssl.SSLContext:
    """For fetching the authority's certificate itself, before it is compared with its pin. Nothing secret may be
    sent over it, and nothing received over it may be believed unchecked."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def explain(error: BaseException, url: str) -> tuple[str, str] | None:
    """What a failed connection to `url` was about and what to do, where TLS has to do with it; else None."""
    parts = urlsplit(url)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return _certificate(seen, parts.hostname or url)
        if isinstance(seen, ssl.SSLError):
            return _handshake(seen, url)
        seen = seen.__cause__ or seen.__context__
    text = f"{type(error).__name__} {error}".lower()
    if parts.scheme == "http" and any(word in text for word in ("disconnected", "badstatusline", "reset by peer")):
        return (
            f"{url} closed the connection without an answer",
            "if the server speaks HTTPS, write https:// instead of http://",
        )
    return None


def is_unknown_authority(error: BaseException) -> bool:
    """Whether a connection failed because nobody trusted here signed the server's certificate."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, ssl.SSLCertVerificationError):
            return seen.verify_code in _UNKNOWN_AUTHORITY
        seen = seen.__cause__ or seen.__context__
    return False


def _certificate(error: ssl.SSLCertVerificationError, host: str) -> tuple[str, str]:
    code = error.verify_code
    if code == _EXPIRED:
        return (
            f"the certificate of {host} has expired",
            "if the clock of this machine is right, have the server's certificate renewed (a Diamond server renews its "
            "own when it is restarted)",
        )
    if code == _NOT_YET_VALID:
        return f"the certificate of {host} is not valid yet", "set the clocks of both machines by NTP"
    if code in _WRONG_NAME:
        return (
            f"the server's certificate is not for {host}",
            "start the server with DIAMOND_PUBLIC_URL set to the address used here, so that its certificate names it",
        )
    if code in _UNKNOWN_AUTHORITY:
        return (
            f"the certificate of {host} was not signed by an authority trusted here",
            "enrol with the line that `diamond endpoint enroll NAME` prints, which names the authority; "
            "elsewhere, set DIAMOND_CA to the authority's certificate",
        )
    return f"the certificate of {host} is not accepted: {error.verify_message}", ""


def _handshake(error: ssl.SSLError, url: str) -> tuple[str, str]:
    reason = (error.reason or str(error)).upper()
    if "WRONG_VERSION_NUMBER" in reason or "HTTP_REQUEST" in reason or "RECORD_LAYER" in reason:
        return (
            f"{url} does not speak HTTPS there",
            "if the server speaks plain HTTP, write http:// instead of https://",
        )
    return f"no secure connection to {url}: {error.reason or error}", ""
