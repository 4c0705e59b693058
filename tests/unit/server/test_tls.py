"""Certificates of the server's own authority: made once, renewed in time, believed by a strict client."""

from __future__ import annotations

import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509

from diamond.core.errors import InstallationProblem
from diamond.core.tls import check_pin, client_context, pin_of
from diamond.server.settings import Settings, load_settings
from diamond.server.tls import prepare
from diamond.server.trust import Certificates, certificates_for, trust_of

DAY = 86_400.0


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return load_settings(home=tmp_path, tls=True, public_url="https://diamond.example.org:8443/base")


def shake_hands(certificates: Certificates, name: str, ca_pem: str) -> None:
    """A whole TLS handshake in memory, with the verification of the newest Pythons switched on."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certificates.cert, certificates.key)
    client = client_context(None, ca_pem=ca_pem)
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=name)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    done = 0
    while done < 2:
        done = 0
        for side in (one, other):
            try:
                side.do_handshake()
                done += 1
            except ssl.SSLWantReadError:
                continue


def test_the_certificate_is_believed_under_each_of_its_names(settings: Settings) -> None:
    made = prepare(settings, now=time.time())
    trust = trust_of(settings, made)
    for name in ("localhost", "127.0.0.1", "::1", "diamond.example.org"):
        assert name in trust.names
        shake_hands(made, name, trust.ca_pem)
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(made, "elsewhere.example.org", trust.ca_pem)
    assert made.key.stat().st_mode & 0o077 == 0
    assert (settings.home / "server/tls/ca.key").stat().st_mode & 0o077 == 0
    check_pin(trust.ca_pem, trust.pin)


def test_it_is_kept_renewed_and_renamed_under_the_same_authority(settings: Settings) -> None:
    now = time.time()
    first = prepare(settings, now=now)
    cert, authority = first.cert.read_bytes(), first.ca.read_text() if first.ca else ""
    assert prepare(settings, now=now + 300 * DAY).cert.read_bytes() == cert
    renewed = prepare(settings, now=now + 340 * DAY)
    assert renewed.cert.read_bytes() != cert
    old, new = x509.load_pem_x509_certificate(cert), x509.load_pem_x509_certificate(renewed.cert.read_bytes())
    assert old.public_key() == new.public_key()
    moved = load_settings(home=settings.home, tls=True, host="192.0.2.7", public_url="https://new.example.org")
    again = prepare(moved, now=now)
    assert {"192.0.2.7", "new.example.org"} <= set(again.names)
    assert again.ca is not None
    assert again.ca.read_text() == authority, "agents have pinned it"
    shake_hands(again, "192.0.2.7", authority)


def test_a_crash_while_making_them_heals(settings: Settings) -> None:
    folder = settings.home / "server/tls"
    pins = set()
    for missing in ("server.pem", "server.key", "ca.pem", "ca.key"):
        pins.add(trust_of(settings, prepare(settings, now=time.time())).pin)
        (folder / missing).unlink()
        made = prepare(settings, now=time.time())
        shake_hands(made, "localhost", trust_of(settings, made).ca_pem)
        (folder / missing).write_text("half")
        made = prepare(settings, now=time.time())
        shake_hands(made, "localhost", trust_of(settings, made).ca_pem)
    assert len(pins) == 2, "only a lost authority is made anew"


def test_own_files_and_what_is_wrong_with_them(settings: Settings, tmp_path: Path) -> None:
    made = prepare(settings, now=time.time())
    files = {"tls_cert": str(made.cert), "tls_key": str(made.key), "tls_ca": str(made.ca)}
    own = load_settings(home=tmp_path / "other", **files)
    assert own.has_tls
    found = certificates_for(own, now=time.time())
    assert found is not None
    assert trust_of(own, found).pin == pin_of(made.ca.read_text() if made.ca else "")
    for name in files:
        with pytest.raises(InstallationProblem) as caught:
            certificates_for(load_settings(home=tmp_path, **{**files, name: "/nowhere"}), now=time.time())
        assert caught.value.field == name
    plain = load_settings(home=tmp_path)
    assert certificates_for(plain, now=time.time()) is None
    assert trust_of(plain, None).pin == ""
