"""What an operator can set, from the environment (``DIAMOND_…``) or from `diamond serve`'s options, which win.

Every setting says here what it does; docs/settings.md is generated from these descriptions and a test compares the
two. Must not open files or connections.
"""

from __future__ import annotations

import ipaddress
import re
from functools import cached_property
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from diamond.core.errors import InstallationProblem
from diamond.core.home import DEFAULT_PORT, Home

MIB = 1024 * 1024
_NAME = re.compile(r"[\w.-]{1,253}|\[?[0-9A-Fa-f:.]{2,45}\]?")
LOOPBACK = ("127.0.0.1", "::1", "localhost")


def _absolute(path: Path) -> Path:
    return path.expanduser().absolute()


def _networks(text: str) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    return tuple(ipaddress.ip_network(item.strip(), strict=False) for item in text.split(",") if item.strip())


def _checked_networks(text: str) -> str:
    _networks(text)  # raises ValueError, which names what is no network
    return text


def _names(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())


def _checked_names(text: str) -> str:
    for name in _names(text):
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name[:100]!r} is not a name or an address; leave out scheme, port and path")
    return text


class Settings(BaseSettings):
    """Settings of one server process. Read once at start."""

    model_config = SettingsConfigDict(env_prefix="DIAMOND_", extra="ignore", frozen=True, env_ignore_empty=True)

    home: Annotated[Path, AfterValidator(_absolute)] = Field(
        default_factory=lambda: Home.find().path,
        description="Folder for everything Diamond keeps on this machine. Default `~/.diamond`.",
    )
    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Anything but a loopback address needs `multi_user`, and `tls` or "
        "`allow_remote`.",
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
        description="Address that other machines use, e.g. `https://diamond.example.org`: every link begins with it, "
        "and requests to other names are refused (see `allowed_hosts`). Default: the address the client uses.",
    )
    allowed_hosts: Annotated[str, AfterValidator(_checked_names)] = Field(
        default="",
        description="Further names and addresses, by commas and without ports, that this server answers to beside that "
        "of `public_url`: e.g. one that agents were enrolled with, or that a proxy asks by. Loopback names are "
        "answered where the server listens on them, and `/api/v1/health` and `/metrics` to any name.",
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
    multi_user: bool = Field(
        default=False,
        description="Accounts, sign-in and projects for many people. Without it there is one user, and the server "
        "listens on this machine only.",
    )
    login_token_days: float = Field(
        default=90.0, gt=0, le=3660, description="How long a token works that `diamond login` got, in days."
    )
    agent_token_days: float = Field(
        default=30.0,
        gt=0,
        le=3660,
        description="How long an agent's token works, in days. An agent that talks to the server replaces its token "
        "when half of that time is over; one that has been silent for longer must be enrolled again.",
    )
    identity_file: str = Field(
        default="",
        description="File that says who may sign in, and with which identity providers. Default: "
        "`server/identity.toml` in the home folder, where there is one. See docs/identity.md.",
    )
    secret_key_file: str = Field(
        default="",
        description="File with the keys that secrets are encrypted with: one a line, 32 bytes in base64, the first for "
        "new ones. Default: `server/secret.keys` in the home folder, made when it is first needed. Backups do not "
        "hold it.",
    )
    secret_key: str = Field(
        default="",
        repr=False,
        description="Those keys themselves, separated by commas, instead of a file: for where the environment comes "
        "from a vault.",
    )
    single_user: bool = Field(
        default=False,
        description="Open an installation that has accounts as one user's again: its first administrator, without "
        "sign-in. Without this it is refused.",
    )
    trusted_proxies: Annotated[str, AfterValidator(_checked_networks)] = Field(
        default="",
        description="Addresses or networks, by commas, of proxies whose `X-Forwarded-For` is believed.",
    )
    database_url: str = Field(
        default="",
        description="`sqlite:///path` or `postgresql://user@host/name`. Default: `server/diamond.db` in the home "
        "folder. Give a password through libpq's own means (`PGPASSFILE`), so that no process list shows it.",
    )
    database_connections: int = Field(
        default=32,
        ge=4,
        le=1000,
        description="Connections to PostgreSQL that all workers hold together; each worker has two more for wake-ups. "
        "Requests wait for a free one. PostgreSQL itself allows 100 unless `max_connections` says otherwise.",
    )
    sqlite_synchronous: Literal["FULL", "NORMAL", "OFF"] = Field(
        default="FULL",
        description="SQLite's `synchronous` pragma. FULL survives a power cut without losing an answered request; "
        "NORMAL is faster and may lose the last moments; OFF is for tests.",
    )
    embedded: str = Field(
        default="",
        description="Name of the endpoint that `diamond up` runs on this machine; empty for none. For one user alone.",
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
    curves_cap_bytes: int = Field(
        default=64 * MIB,
        ge=8 * MIB,
        description="How much of one job's curves the server keeps, of what it logs and what is sampled together. "
        "Beyond it older points are thinned out; the newest, and the first, smallest and largest of each curve, stay.",
    )
    output_cap_bytes: int = Field(
        default=256 * 1024 * MIB,
        ge=MIB,
        description="How many bytes of files one job may bring to the server. What is more stays at the endpoint.",
    )
    job_bytes_per_s: float = Field(
        default=32 * MIB,
        ge=64 * 1024,
        description="How many bytes of log and curves one job may send a second, in each server process; what may come "
        "in eight seconds may come at once. What is more is taken later: its agent keeps it.",
    )
    endpoint_bytes_per_s: float = Field(
        default=128 * MIB, ge=64 * 1024, description="The same of all jobs of one endpoint together."
    )
    agent_calls_per_s: float = Field(
        default=200.0, ge=5, description="How often one endpoint's agent may call a second, likewise."
    )
    disk_reserve_bytes: int = Field(
        default=1024 * MIB,
        ge=0,
        description="Free space on the server's disk that logs, curves and uploads leave alone, so that everything "
        "else goes on when the disk is nearly full; at most a twentieth of the disk.",
    )
    max_json_bytes: int = Field(
        default=8 * MIB, ge=1024, description="Largest request body of JSON; a larger one is answered with 413."
    )
    max_report_bytes: int = Field(
        default=16 * MIB, ge=1024, description="Largest report of an agent (log bytes and states together)."
    )
    header_timeout_s: float = Field(
        default=20.0,
        gt=0,
        description="A connection that has not sent a whole request head after this many seconds is closed.",
    )
    body_timeout_s: float = Field(
        default=60.0,
        gt=0,
        description="Seconds the server waits for a request's body in all, plus what the bytes that came would take at "
        "4 KiB a second; then it is answered with 408.",
    )
    drain_timeout_s: float = Field(
        default=30.0,
        gt=0,
        description="Every so many seconds it is looked whether a client takes its answer: one that took less than "
        "1 KiB a second of what the buffers could not hold is hung up on.",
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
    sessions_per_user: int = Field(
        default=50,
        ge=1,
        description="Browsers that one user may be signed in with; one more ends the session used longest ago.",
    )
    tokens_per_user: int = Field(default=200, ge=1, description="Tokens of one user that may work at a time.")
    projects_per_user: int = Field(
        default=100, ge=0, description="Projects, beside their own, that one user may be an owner of by making them."
    )
    streams_per_user: int = Field(
        default=32,
        ge=1,
        description="Live streams (of events, of logs) that one user may have open, in each server process.",
    )
    max_streams: int = Field(
        default=2048, ge=1, description="Live streams of all users together, in each server process."
    )
    workers: int = Field(
        default=1, ge=1, le=64, description="Server processes. More than one need PostgreSQL; about one for each core."
    )
    threads: int = Field(
        default=8,
        ge=4,
        le=1000,
        description="Requests that each worker works on at the same time; others wait their turn. Python runs one at "
        "a time anyway, and more only get in each other's way. Waiting requests (long polls, live streams) hold none.",
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
        default=7.0,
        gt=0,
        description="An unfinished upload is removed after this many days without a byte, an uploaded file or an "
        "output after as many days in which nothing referred to it.",
    )
    smtp_host: str = Field(default="", description="Mail server that notices are handed to; empty: no e-mail is sent.")
    smtp_port: int = Field(default=587, ge=1, le=65535, description="Its port; 465 speaks TLS from the first byte.")
    smtp_starttls: bool = Field(
        default=True, description="Send only after STARTTLS with a valid certificate. Off: plain, within a machine."
    )
    smtp_ca: str = Field(
        default="",
        description="File with the authority behind the mail server's certificate, where systems do not know it.",
    )
    smtp_user: str = Field(
        default="", description="Name to sign in to the mail server with; empty: without signing in."
    )
    smtp_password_file: str = Field(default="", description="File with its password, readable by the server alone.")
    mail_from: str = Field(
        default="", description="Sender of the mails, e.g. `diamond@example.org`. Needed with `smtp_host`."
    )
    mail_domains: str = Field(default="", description="Domains, by commas, that notices may be mailed to; empty: any.")
    webhook_allow_private: bool = Field(
        default=False,
        description="Let notices be sent to addresses inside this network (and, on this machine, by plain HTTP). Every "
        "user could then have the server ask anything that it can reach there.",
    )
    webhook_refused: Annotated[str, AfterValidator(_checked_networks)] = Field(
        default="",
        description="Addresses or networks, by commas, that no notice is sent to. Private and other special addresses, "
        "and those of the server's machine, are refused already: name public ones that are inside, such as a campus "
        "network.",
    )
    audit_head_log: bool = Field(
        default=False,
        description="Write number and hash of the audit log's last entry to the server's log at start and every day. "
        "Kept elsewhere, it shows whether the audit log was cut or written anew.",
    )

    @property
    def home_dir(self) -> Home:
        return Home(self.home)

    @property
    def database(self) -> str:
        """The database to open: what was set, else SQLite in the home folder."""
        return self.database_url or f"sqlite:///{self.home / 'server' / 'diamond.db'}"

    @cached_property
    def allowed_names(self) -> tuple[str, ...]:
        return _names(self.allowed_hosts)

    @cached_property
    def trusted_networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        return _networks(self.trusted_proxies)

    @cached_property
    def webhook_refused_networks(self) -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
        return _networks(self.webhook_refused)

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
