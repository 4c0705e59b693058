"""What `diamond exec` makes of keys and words, without a server."""

from __future__ import annotations

import pytest

from diamond.cli import main
from diamond.cli.exec import Escape, Unsent


@pytest.mark.parametrize(
    ("typed", "sent", "leaves"),
    [
        ([b"~."], b"", True),
        ([b"~", b"."], b"", True),
        ([b"ls\r~."], b"ls\r", True),
        ([b"ls ~."], b"ls ~.", False),
        ([b"~~."], b"~.", False),
        ([b"~a\r~", b".x"], b"~a\r", True),
        ([b"~/bin\r"], b"~/bin\r", False),
        ([b"\r", b"~"], b"\r", False),
    ],
)
def test_leaving_as_ssh_does(typed: list[bytes], sent: bytes, leaves: bool) -> None:
    escape, passed, left = Escape(), b"", False
    for data in typed:
        more, left = escape.feed(data)
        passed += more
    assert (passed, left) == (sent, leaves)


class Recorder:
    def __init__(self, unsent: Unsent) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._unsent = unsent

    def write(self, data: bytes) -> None:
        self.calls.append(("write", data))

    def resize(self, rows: int, cols: int) -> None:
        self.calls.append(("resize", rows, cols))

    def signal(self, number: int) -> None:
        self.calls.append(("signal", number))

    def end_input(self) -> None:
        self.calls.append(("end",))
        self._unsent.close()


def test_what_is_typed_during_an_outage_goes_out_as_one() -> None:
    rooms: list[None] = []
    unsent = Unsent(lambda: rooms.append(None))
    for key in (b"l", b"s", b"\r"):
        unsent.type(key)
    unsent.resize(10, 20)
    unsent.resize(30, 40)
    unsent.signal(2)
    unsent.end()
    assert not unsent.is_full
    recorder = Recorder(unsent)
    unsent.send_all(recorder)  # type: ignore[arg-type]
    assert recorder.calls == [("resize", 30, 40), ("signal", 2), ("write", b"ls\r"), ("end",)]
    assert rooms
    unsent.type(bytes(2_000_000))
    assert unsent.is_full


def test_the_command_stands_after_two_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main.main(["exec", "task"])
    assert caught.value.code == 2
    assert "diamond exec TASK -- nvidia-smi" in capsys.readouterr().err
    with pytest.raises(SystemExit) as caught:
        main.main(["exec", "task", "ls", "-l"])
    assert caught.value.code == 2
