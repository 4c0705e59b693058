"""What may be a password, and what is kept of it."""

from __future__ import annotations

import threading
import time

import pytest

from diamond.core.errors import InvalidInput, Unavailable
from diamond.server.services import passwords
from diamond.server.services.throttling import network_of


@pytest.mark.parametrize(
    ("password", "word"),
    [
        ("short", "12 to 256"),
        ("x" * 11, "12 to 256"),
        ("ab1" * 100, "12 to 256"),
        ("bobbobbob123", "user name"),
        ("B-o-b-b-o-b-2026", "user name"),
        ("passwordpassword", "guess"),
        ("Password-12345", "guess"),
        ("123456789012", "guess"),
        ("abababababababab", "guess"),
    ],
)
def test_what_is_no_password(password: str, word: str) -> None:
    with pytest.raises(InvalidInput, match=word) as caught:
        passwords.check(password, "bob", field="new_password")
    assert (caught.value.field, password in str(caught.value)) == ("new_password", False)


@pytest.mark.parametrize(
    "password", ["correct horse battery staple", "bob likes long walks", "8310 4729 5611", "пароль из слов"]
)
def test_what_is_one(password: str) -> None:
    passwords.check(password, "bob")


def test_hashes_as_their_authors_recommend() -> None:
    """RFC 9106's second choice: 64 MiB, three passes; and a random salt each time."""
    first, second = passwords.hashed("correct horse battery"), passwords.hashed("correct horse battery")
    assert first.startswith("$argon2id$v=19$m=65536,t=3,p=4$")
    assert first != second
    assert passwords.matches("correct horse battery", first) == (True, None)
    assert passwords.matches("correct horse batterx", first) == (False, None)
    assert passwords.matches("anything", None) == (False, None)
    assert passwords.matches("x" * 100_000, first) == (False, None)


def test_what_counts_as_one_address() -> None:
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff") != network_of("2001:db8:0:1::1")
    assert network_of("192.0.2.1") != network_of("192.0.2.2")
    assert network_of("not an address") == "not an address"


def test_a_flood_of_sign_ins_holds_few_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has to wait for a hash holds a thread that others need: beyond some, they are told to come back."""
    entered, go_on = threading.Semaphore(0), threading.Event()

    class Slow:
        def hash(self, _password: str) -> str:
            entered.release()
            go_on.wait(30)
            return "hashed"

    monkeypatch.setattr(passwords, "_hasher", Slow)
    results: list[object] = []

    def try_one() -> None:
        try:
            results.append(passwords.hashed("a long enough password"))
        except Unavailable as error:
            results.append(error)

    threads = [threading.Thread(target=try_one) for _ in range(60)]
    for thread in threads:
        thread.start()
    for _ in range(4):
        assert entered.acquire(timeout=10)
    deadline = time.monotonic() + 10
    while len(results) < 40 and time.monotonic() < deadline:
        time.sleep(0.01)
    turned_away = len(results)
    go_on.set()
    for thread in threads:
        thread.join(30)
    assert turned_away == 40  # 4 work, 16 wait
    assert sum(result == "hashed" for result in results) == 20
