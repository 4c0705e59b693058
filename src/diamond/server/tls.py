"""The server's certificate: the operator's own, or one signed by a private authority that lives in the home.

The private authority is made once and kept, since agents pin it; certificates under it are made anew when they near
their end or when the machine has got another name or address. Its key never leaves the home.
"""

from __future__ import annotations

import contextlib
import datetime
import fcntl
import ipaddress
import logging
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from diamond.core.errors import InstallationProblem
from diamond.core.rundir import write_atomic
from diamond.server.settings import Settings
from diamond.server.trust import Certificates, read_text

log = logging.getLogger("diamond.server")

_CA_DAYS = 3650
_SERVER_DAYS = 365
_RENEW_DAYS = 30
_SIOCGIFADDR = 0x8915
_DAY = datetime.timedelta(days=1)


def prepare(settings: Settings, *, now: float) -> Certificates:
    """The certificate to listen with. Makes and renews the private one as need be.

    Raises:
        InstallationProblem: the operator's own files do not fit.
    """
    if settings.tls_cert:
        return _own_files(settings, now)
    return _private(settings.home / "server" / "tls", wanted_names(settings), _moment(now))


def wanted_names(settings: Settings) -> tuple[str, ...]:
    """Every name and address this server may be called by, as far as can be known here."""
    public = urlsplit(settings.public_url).hostname or ""
    allowed = (name.strip("[]") for name in settings.allowed_names)
    names = ["localhost", "127.0.0.1", "::1", public, *allowed, socket.gethostname(), socket.getfqdn()]
    if settings.host in ("0.0.0.0", "::", ""):  # noqa: S104 - compared, not bound
        names += _addresses()
    else:
        names.append(settings.host)
    return tuple(dict.fromkeys(name.lower() for name in names if name and _general_name(name) is not None))


def _addresses() -> Iterator[str]:
    """The IPv4 address of each network interface."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                yield socket.inet_ntoa(answer[20:24])


def _general_name(name: str) -> x509.GeneralName | None:
    with contextlib.suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(name))
    try:
        return x509.DNSName(name.encode("idna").decode("ascii"))
    except (UnicodeError, ValueError):
        return None


def _private(folder: Path, names: tuple[str, ...], now: datetime.datetime) -> Certificates:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    files = {name: folder / name for name in ("ca.pem", "ca.key", "server.pem", "server.key")}
    authority, authority_key = _authority(files["ca.pem"], files["ca.key"], now)
    if not _still_good(files["server.pem"], files["server.key"], authority, names, now):
        # The same key again: who pinned it goes on working.
        key = _load_key(files["server.key"]) or ec.generate_private_key(ec.SECP256R1())
        write_atomic(files["server.key"], _key_pem(key))
        write_atomic(files["server.pem"], _sign(key, authority, authority_key, names, now))
        log.info("made a certificate for %s", ", ".join(names))
    return Certificates(cert=files["server.pem"], key=files["server.key"], ca=files["ca.pem"], names=names)


def _authority(
    cert_file: Path, key_file: Path, now: datetime.datetime
) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = _load_key(key_file)
    cert = _load_cert(cert_file)
    if key and cert and cert.public_key() == key.public_key() and cert.not_valid_after_utc > now + _RENEW_DAYS * _DAY:
        return cert, key
    if cert is not None:
        log.warning("the private authority is made anew: its key is gone or its time is up; agents must enrol again")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"Diamond on {socket.gethostname()}"[:64])])
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(now + _CA_DAYS * _DAY)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .sign(key, hashes.SHA256())
    )
    # The key first: a certificate without its key would be thrown away at the next start.
    write_atomic(key_file, _key_pem(key))
    write_atomic(cert_file, cert.public_bytes(serialization.Encoding.PEM))
    return cert, key


def _sign(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    names: tuple[str, ...],
    now: datetime.datetime,
) -> bytes:
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    cert = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Diamond server")]))
        .issuer_name(authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _DAY)
        .not_valid_after(min(now + _SERVER_DAYS * _DAY, authority.not_valid_after_utc))
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False)
        .add_extension(x509.SubjectAlternativeName(_general_names(names)), critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return cert.public_bytes(serialization.Encoding.PEM)


def _general_names(names: tuple[str, ...]) -> list[x509.GeneralName]:
    return [found for name in names if (found := _general_name(name)) is not None]


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _still_good(
    cert_file: Path, key_file: Path, authority: x509.Certificate, names: tuple[str, ...], now: datetime.datetime
) -> bool:
    cert, key = _load_cert(cert_file), _load_key(key_file)
    if cert is None or key is None or cert.public_key() != key.public_key():
        return False
    try:
        cert.verify_directly_issued_by(authority)
        named = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except Exception:  # whatever is wrong with it, another is quickly made
        return False
    return set(_general_names(names)) <= set(named) and cert.not_valid_after_utc > now + _RENEW_DAYS * _DAY


def _own_files(settings: Settings, now: float) -> Certificates:
    cert_file, key_file = Path(settings.tls_cert), Path(settings.tls_key or settings.tls_cert)
    cert = _load_cert(cert_file)
    if cert is None:
        read_text(cert_file, "tls_cert")
        raise InstallationProblem(f"setting tls_cert: {cert_file} holds no certificate", field="tls_cert")
    read_text(key_file, "tls_key")
    left = cert.not_valid_after_utc - _moment(now)
    if left < _RENEW_DAYS * _DAY:
        log.warning(
            "the certificate %s %s", cert_file, f"ends in {left.days} days" if left.days >= 0 else "has expired"
        )
    if settings.tls_ca:
        read_text(Path(settings.tls_ca), "tls_ca")
    return Certificates(cert=cert_file, key=key_file, ca=Path(settings.tls_ca) if settings.tls_ca else None)


def _load_cert(path: Path) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except (OSError, ValueError):
        return None


def _load_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), None)
    except (OSError, ValueError, TypeError):
        return None
    return key if isinstance(key, ec.EllipticCurvePrivateKey) else None


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _moment(now: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(now, datetime.UTC).replace(microsecond=0)
