"""Images that lie in an engine's own store, as files in ours: `image.ref`, with name, id and size, a line each."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REF_FILE = "image.ref"


@dataclass(frozen=True, kw_only=True)
class Ref:
    """Attributes:
    name: by which the engine starts it; no other image here has it.
    id: of its contents, as hexadecimal digits of a sha256: the same after `save` and `load`.
    """

    name: str
    id: str
    size_bytes: int

    @property
    def digest(self) -> str:
        return f"sha256:{self.id}"

    @staticmethod
    def read(path: Path) -> Ref:
        """Of an image (the file) or a layer (a folder with the file). Raises OSError, ValueError."""
        file = path / REF_FILE if path.is_dir() else path
        name, image, size = file.read_text().split()
        return Ref(name=name, id=image, size_bytes=int(size))

    def write(self, path: Path) -> None:
        path.write_text(f"{self.name}\n{self.id}\n{self.size_bytes}\n")
