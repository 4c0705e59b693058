"""Settings: read from the environment, refused with a name, and every one documented."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from diamond.core.errors import InstallationProblem
from diamond.server.settings import Settings, describe, load_settings

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"


@pytest.mark.parametrize("name", list(Settings.model_fields))
def test_every_setting_is_described_and_in_the_docs(name: str) -> None:
    assert Settings.model_fields[name].description
    assert f"`DIAMOND_{name.upper()}`" in (DOCS / "settings.md").read_text(), "run docs/generate_settings.py"


@pytest.mark.parametrize(("script", "page"), [("generate_settings.py", "settings.md"), ("generate_rest.py", "rest.md")])
def test_generated_pages_are_up_to_date(script: str, page: str) -> None:
    made = runpy.run_path(str(DOCS / script))["text"]()
    assert (DOCS / page).read_text() == made, f"run docs/{script}"


def test_environment_and_choices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DIAMOND_HOME", str(tmp_path))
    monkeypatch.setenv("DIAMOND_PORT", "8000")
    monkeypatch.setenv("DIAMOND_LOG_FORMAT", "")
    settings = load_settings(port=None)
    assert (settings.port, settings.home, settings.log_format) == (8000, tmp_path, "auto")
    assert settings.database == f"sqlite:///{tmp_path}/server/diamond.db"
    assert load_settings(port=9).port == 9
    assert {row[0] for row in describe()} == set(Settings.model_fields)


@pytest.mark.parametrize(("name", "value"), [("PORT", "70000"), ("PORT", "x"), ("SQLITE_SYNCHRONOUS", "MAYBE")])
def test_nonsense_is_refused_by_name(monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(f"DIAMOND_{name}", value)
    with pytest.raises(InstallationProblem, match=name.lower()) as caught:
        load_settings()
    assert f"DIAMOND_{name}" in caught.value.hint
