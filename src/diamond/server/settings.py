"""What an operator can set, from the environment (``DIAMOND_…``) or from `diamond serve`'s options, which win.

Every setting says here what it does; docs/settings.md is generated from these descriptions and a test compares the
two. Must not open files or connections.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from diamond.core.errors import InstallationProblem
from diamond.core.home import DEFAULT_PORT, Home

MIB = 1024 * 1024
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


class Settings(BaseSettings):
    """Settings of one server process. Read once at start."""

    model_config = SettingsConfigDict(env_prefix="DIAMOND_", extra="ignore", frozen=True, env_ignore_empty=True)

    home: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=lambda: Home.find().path,
        description="Folder for everything Diamond keeps on this machine. Default `~/.diamond`.",
    )
    host: str = Field(
        default="127.0.0.1", description="Address to listen on. Anything but a loopback address needs `allow_remote`."
    )
    port: int = Field(
        default=DEFAULT_PORT, ge=0, le=65535, description="TCP port to listen on; 0 lets the system choose a free one."
    )
    allow_remote: bool = Field(
        default=False,
        description="Listen beyond this machine with plain HTTP, for a TLS proxy in front. Not needed with `tls`.",
    )
    public_url: str = Field(
        default="",
        description="Address that other machines use, e.g. `https://diamond.example.org`; enrolment lines carry it. "
        "Default: the address the client uses.",
    )
    tls: bool = Field(
        default=False,
        description="Speak HTTPS: with `tls_cert` where that is set, else with a certificate of a private authority "
        "in the home folder, which agents pin when they enrol.",
    )
    tls_cert: str = Field(
        default="", description="File with a certificate (and its chain) of your own, in PEM. Implies `tls`."
    )
    tls_key: str = Field(default="", description="File with its private key. Default: the same file.")
    tls_ca: str = Field(
        default="",
        description="File with the authority behind `tls_cert`, or behind the proxy in front, where systems do not "
        "know it by themselves. Agents pin it.",
    )
    database_url: str = Field(
        default="",
        description="`sqlite:///path` or `postgresql://user@host/name`. Default: `server/diamond.db` in the home "
        "folder. Give a password through libpq's own means (`PGPASSFILE`), so that no process list shows it.",
    )
    sqlite_synchronous: Literal["FULL", "NORMAL", "OFF"] = Field(
        default="FULL",
        description="SQLite's `synchronous` pragma. FULL survives a power cut without losing an answered request; "
        "NORMAL is faster and may lose the last moments; OFF is for tests.",
    )
    embedded: str = Field(
        default="", description="Name of the endpoint that `diamond up` runs on this machine; empty for none."
    )
    log_cap_bytes: int = Field(
        default=256 * MIB,
        ge=MIB,
        description="How much of one job's log the server keeps: its first segment and the newest ones. "
        "The complete file stays on the endpoint.",
    )
    log_segment_bytes: int = Field(
        default=8 * MIB, ge=64 * 1024, description="Size of the files a log is kept in; the cap drops whole files."
    )
    max_json_bytes: int = Field(
        default=8 * MIB, ge=1024, description="Largest request body of JSON; a larger one is answered with 413."
    )
    max_report_bytes: int = Field(
        default=16 * MIB, ge=1024, description="Largest report of an agent (log bytes and states together)."
    )
    shells_per_task: int = Field(
        default=8, ge=0, description="Shells (`diamond exec`, `diamond ssh`) that may be open in one task; 0 for none."
    )
    shells_per_user: int = Field(default=16, ge=0, description="Shells that one user may have open.")
    shells_per_endpoint: int = Field(default=64, ge=0, description="Shells that may be open at one endpoint.")
    shell_patience_s: float = Field(
        default=60.0,
        ge=5,
        description="A shell is ended when its client, or its endpoint's agent, has been silent for this many seconds.",
    )
    shell_idle_s: float = Field(
        default=43_200.0, ge=1, description="A shell is ended after this many seconds without a byte either way."
    )
    threads: int = Field(
        default=64,
        ge=4,
        le=1000,
        description="Requests that may work at the same time. Waiting requests (long polls, live streams) hold none.",
    )
    slow_request_s: float = Field(
        default=1.0, gt=0, description="A request that takes longer than this many seconds is logged."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least severity that is logged. DEBUG logs every request."
    )
    log_format: Literal["auto", "text", "json"] = Field(
        default="auto", description="Log lines as readable text or as JSON objects; auto: text on a terminal."
    )
    partial_upload_days: float = Field(
        default=7.0, gt=0, description="An unfinished upload is removed after this many days without a byte."
    )

    @property
    def home_dir(self) -> Home:
        return Home(self.home)

    @property
    def database(self) -> str:
        """The database to open: what was set, else SQLite in the home folder."""
        return self.database_url or f"sqlite:///{self.home / 'server' / 'diamond.db'}"

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK

    @property
    def has_tls(self) -> bool:
        return self.tls or bool(self.tls_cert)


def load_settings(**chosen: object) -> Settings:
    """Settings from the environment; `chosen` values that are not None win.

    Raises:
        InstallationProblem: naming the variable and what is wrong with it.
    """
    given = {name: value for name, value in chosen.items() if value is not None}
    try:
        return Settings(**given)  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        name = str(first["loc"][0]) if first["loc"] else ""
        raise InstallationProblem(
            f"setting {name}: {first['msg']}",
            hint=f"mend or unset DIAMOND_{name.upper()}; docs/settings.md lists the settings",
            field=name,
        ) from error


def describe() -> list[tuple[str, str, str, str]]:
    """Name, environment variable, default and description of every setting, for the documentation."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = "`~/.diamond`" if name == "home" else f"`{field.default}`" if field.default != "" else "(empty)"
        rows.append((name, f"DIAMOND_{name.upper()}", default, field.description or ""))
    return rows
