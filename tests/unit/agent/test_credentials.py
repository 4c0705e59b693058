"""Replacing a token: killed at any file system call, the agent holds one that the server accepts."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from diamond.agent.credentials import Credentials
from diamond.core.enrolment import token_hash
from diamond.core.errors import InstallationProblem, ServerUnreachable
from testing.dying import killed_at


class Tokens:
    """The server's side of it, kept in a folder so that it outlives the agent's process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def accepts(self, token: str) -> bool:
        return (self.folder / token_hash(token)).exists()

    def add(self, digest: str) -> None:
        os.close(os.open(self.folder / digest, os.O_CREAT))

    def caller(self, credentials: Credentials) -> Any:
        def call(method: str, path: str, body: Any) -> None:
            assert self.accepts(credentials.token), "a dead token was used"
            if (method, path) == ("PUT", "/agent/token"):
                self.add(body["sha256"])
            else:
                assert (method, path) == ("POST", "/agent/token/confirm")
                for file in self.folder.iterdir():
                    if file.name != token_hash(credentials.token):
                        file.unlink()

        return call


def test_killed_anywhere_it_still_holds_a_token_that_works(tmp_path: Path) -> None:
    ended = False
    nth = 0
    while not ended:
        nth += 1
        folder = tmp_path / str(nth)
        folder.mkdir()
        tokens = Tokens(folder / "server")
        path = folder / "token"
        path.write_text("dmda_first")
        tokens.add(token_hash("dmda_first"))

        def rotate(path: Path = path, tokens: Tokens = tokens) -> None:
            credentials = Credentials.load(path)
            credentials.rotate(tokens.caller(credentials))

        ended = not killed_at(nth, rotate)
        assert tokens.accepts(Credentials.load(path).token), nth
        rotate()  # whatever was left half done is finished
        assert tokens.accepts(Credentials.load(path).token)
        assert not tokens.accepts("dmda_first")
        assert len(list((folder / "server").iterdir())) == 1
        assert path.stat().st_mode & 0o077 == 0
    assert nth > 5


def test_a_server_that_cannot_be_told_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("dmda_first")
    credentials = Credentials.load(path)

    def call(_method: str, _path: str, _body: Any) -> None:
        raise ServerUnreachable("gone")

    with pytest.raises(ServerUnreachable):
        credentials.rotate(call)
    assert credentials.token == path.read_text() == "dmda_first"


def test_a_token_that_changed_on_disk_is_taken_up(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("dmda_one\n")
    credentials = Credentials.load(path)
    assert credentials.token == "dmda_one"
    assert credentials.newer_than("dmda_one") == ""
    path.write_text("dmda_two")
    assert credentials.newer_than("dmda_one") == "dmda_two"
    assert credentials.newer_than("dmda_one") == "dmda_two", "also for a request that was sent before it was read"
    assert credentials.token == "dmda_two"
    path.unlink()
    assert credentials.newer_than("dmda_two") == ""
    assert Credentials("x").newer_than("x") == ""
    assert not Credentials("x").can_rotate


@pytest.mark.parametrize("content", [None, b"", b"\xff\xfe"])
def test_files_without_a_token(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(InstallationProblem, match="token"):
        Credentials.load(tmp_path / "token")
