"""identity.toml: who may sign in here, and which identity providers vouch for them.

Read once, at the start of the server. A mistake in it stops the start and is named by line and field: a slip must not
open an installation to everybody, nor quietly lock everybody out. docs/identity.md explains it to operators.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diamond.core.errors import InstallationProblem
from diamond.server import identity_values as values
from diamond.server.settings import Settings

FILE_NAME = "identity.toml"
DISCOVERY_PATH = "/.well-known/openid-configuration"
_PAGE = "docs/identity.md lists what the file may hold"


@dataclass(frozen=True, kw_only=True)
class Allow:
    """Whom a provider may make an account for. One rule that fits is enough.

    Attributes:
        everybody: whoever has an account at the provider.
        domains: of an address the provider has verified, or of a claim it vouches for; ``*.example.org`` stands for
            those below it.
        emails: verified addresses.
        subjects: the provider's own identifiers of people.
        groups: values of the claim `groups_claim`; at GitHub, organisations.
        every_sign_in: also people who have an account already must fit a rule, each time.
    """

    everybody: bool = False
    domains: tuple[str, ...] = ()
    emails: tuple[str, ...] = ()
    subjects: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    groups_claim: str = "groups"
    every_sign_in: bool = False

    @property
    def names_anybody(self) -> bool:
        return self.everybody or bool(self.domains or self.emails or self.subjects or self.groups)


@dataclass(frozen=True, kw_only=True)
class ProviderConfig:
    """An identity provider, with all that its preset fills in.

    Attributes:
        domain_claims: claims that are a domain the provider vouches for.
        address_claims: claims of the form name@domain, whose domain it vouches for.
        email_domains: whether having verified an address says enough about its domain.
        link_prompt: OpenID Connect's `prompt` when a signed-in user links an identity: whichever account the browser
            happens to be signed in with there must not be taken in silence.
        web_url, api_url: of GitHub, or of a GitHub Enterprise server.
        timeout_s: for each answer of the provider.
    """

    name: str
    title: str
    kind: str = "oidc"
    issuer: str = ""
    discovery_url: str = ""
    client_id: str
    client_secret: str = field(default="", repr=False)
    scopes: tuple[str, ...] = ()
    allow: Allow = Allow()
    create_accounts: bool = False
    domain_claims: tuple[str, ...] = ()
    address_claims: tuple[str, ...] = ()
    email_domains: bool = True
    link_prompt: str = ""
    web_url: str = ""
    api_url: str = ""
    timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True)
class IdentityConfig:
    """What the file says. Without a file: local accounts alone."""

    local_accounts: bool = True
    owners_invite: bool = False  # whether owners of projects may invite people who have no account yet
    providers: tuple[ProviderConfig, ...] = ()


_PRESETS: dict[str, dict[str, Any]] = {
    "globus": {
        "title": "Globus", "issuer": "https://auth.globus.org", "scopes": ["openid", "profile", "email"],
        "address_claims": ["preferred_username"], "link_prompt": "login",
    },
    "cilogon": {
        "title": "CILogon", "issuer": "https://cilogon.org",
        "scopes": ["openid", "profile", "email", "org.cilogon.userinfo"], "address_claims": ["eppn"],
    },
    "orcid": {"title": "ORCID", "issuer": "https://orcid.org", "scopes": ["openid"]},
    "google": {
        "title": "Google", "issuer": "https://accounts.google.com", "scopes": ["openid", "profile", "email"],
        "domain_claims": ["hd"], "link_prompt": "select_account",
        # Anybody could once have had a Google account made for an address; `hd` says who manages it today.
        "email_domains": False,
    },
    "github": {
        "title": "GitHub", "kind": "github", "web_url": "https://github.com", "api_url": "https://api.github.com",
    },
}  # fmt: skip


class _Mistake(Exception):
    def __init__(self, where: str, key: str, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.where, self.key, self.message, self.hint = where, key, message, hint


def load(settings: Settings) -> IdentityConfig:
    """What the operator's file says; the default where there is none and none was asked for.

    Raises:
        InstallationProblem: the file cannot be read, or says something that cannot be meant.
    """
    chosen = settings.identity_file
    path = Path(chosen).expanduser() if chosen else settings.home_dir.server / FILE_NAME
    try:
        text = path.read_text(encoding="utf-8")
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not chosen:
            return IdentityConfig()
        raise InstallationProblem(
            f"{path} does not exist", hint="write it, or unset DIAMOND_IDENTITY_FILE", field="identity_file"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InstallationProblem(f"{path} cannot be read: {error}", hint=_PAGE, field="identity_file") from error
    return parse(text, path=path, private=not mode & (stat.S_IRWXG | stat.S_IRWXO))


def parse(text: str, *, path: Path, private: bool, environment: Mapping[str, str] | None = None) -> IdentityConfig:
    """The file's text. `private`: whether only its owner can read it; it may then hold secrets itself."""
    env = os.environ if environment is None else environment
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InstallationProblem(f"{path} is not TOML: {error}", hint=_PAGE, field="identity_file") from error
    try:
        return _parse_file(raw, path.parent, private, env)
    except _Mistake as mistake:
        line = _line_of(text, mistake.where, mistake.key)
        name = ".".join(part for part in (mistake.where, mistake.key) if part)
        raise InstallationProblem(
            f"{path}{f', line {line}' if line else ''}: {name}: {mistake.message}",
            hint=mistake.hint or _PAGE,
            field=name,
        ) from None


def _parse_file(raw: dict[str, Any], folder: Path, private: bool, env: Mapping[str, str]) -> IdentityConfig:
    _only(raw, ("accounts", "provider"), "")
    accounts = _table(raw, "accounts", "")
    _only(accounts, ("local", "owners_invite"), "accounts")
    local = _take(accounts, "local", "accounts", values.flag, True)
    owners_invite = _take(accounts, "owners_invite", "accounts", values.flag, False)
    items = raw.get("provider", [])
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _Mistake("", "provider", "must be [[provider]] tables, with two brackets")
    providers = tuple(_provider(item, f"provider[{number}]", folder, private, env) for number, item in enumerate(items))
    names = [provider.name for provider in providers]
    issuers = [provider.issuer for provider in providers]
    for number, provider in enumerate(providers):
        if provider.name in names[:number]:
            raise _Mistake(f"provider[{number}]", "name", f"{provider.name!r} is there twice")
        if provider.issuer in issuers[:number]:
            # Two entries for one issuer would let the laxer one make accounts that the other one signs in.
            raise _Mistake(f"provider[{number}]", "issuer", f"{provider.issuer} is there twice")
    if not local and not providers:
        raise _Mistake("accounts", "local", "is false, and there is no [[provider]]: nobody could sign in")
    return IdentityConfig(local_accounts=local, owners_invite=owners_invite, providers=providers)


_KEYS = (
    "name", "title", "kind", "issuer", "discovery_url", "client_id", "client_secret", "client_secret_file",
    "client_secret_env", "scopes", "allow", "create_accounts", "domain_claims", "address_claims", "email_domains",
    "link_prompt", "web_url", "api_url", "timeout_s",
)  # fmt: skip
_GITHUB_ONLY = ("web_url", "api_url")
_OIDC_ONLY = ("issuer", "discovery_url", "domain_claims", "address_claims", "email_domains", "link_prompt")
_ALLOW_KEYS = ("everybody", "domains", "emails", "subjects", "groups", "groups_claim", "every_sign_in")


def _provider(given: dict[str, Any], where: str, folder: Path, private: bool, env: Mapping[str, str]) -> ProviderConfig:
    _only(given, _KEYS, where)
    name = _take(given, "name", where, values.provider_name, None)
    raw = {**_PRESETS.get(name, {}), **given}
    kind = _take(raw, "kind", where, values.kind, "oidc")
    if name in _PRESETS and kind != _PRESETS[name].get("kind", "oidc"):
        raise _Mistake(where, "kind", f"the provider called {name!r} is known to be of another kind; name it otherwise")
    for key in _OIDC_ONLY if kind == "github" else _GITHUB_ONLY:
        if key in given:
            raise _Mistake(where, key, f"means nothing for a provider of kind {kind!r}")
    allow = _allow(_table(raw, "allow", where), f"{where}.allow", kind)
    create = _take(raw, "create_accounts", where, values.flag, allow.names_anybody)
    if create and not allow.names_anybody:
        raise _Mistake(
            where, "create_accounts", "is true, and `allow` names nobody",
            "say who may have an account: allow = { domains = [\"example.org\"] }, or { everybody = true }",
        )  # fmt: skip
    secret = _secret(given, where, folder, private, env)
    if not secret and (kind == "github" or name in _PRESETS):
        raise _Mistake(where, "client_secret_file", "is missing: this provider gives every client a secret")
    if kind == "github":
        web = _take(raw, "web_url", where, values.address, "https://github.com")
        api = _take(raw, "api_url", where, values.address, "https://api.github.com")
        base = ("read:user", "user:email", *(("read:org",) if allow.groups else ()))
        places = {"issuer": web, "web_url": web, "api_url": api}
    else:
        base = ("openid", "profile", "email")
        places = _issuer(raw, where)
    scopes = _take(raw, "scopes", where, values.words, base)
    if kind == "oidc" and "openid" not in scopes:
        raise _Mistake(where, "scopes", 'must hold "openid"')
    return ProviderConfig(
        name=name,
        title=_take(raw, "title", where, values.text, name),
        kind=kind,
        client_id=_take(raw, "client_id", where, values.text, None),
        client_secret=secret,
        scopes=scopes,
        allow=allow,
        create_accounts=create,
        domain_claims=_take(raw, "domain_claims", where, values.words, ()),
        address_claims=_take(raw, "address_claims", where, values.words, ()),
        email_domains=_take(raw, "email_domains", where, values.flag, True),
        link_prompt=_take(raw, "link_prompt", where, values.prompt, ""),
        timeout_s=_take(raw, "timeout_s", where, values.seconds, 10.0),
        **places,
    )


def _issuer(raw: dict[str, Any], where: str) -> dict[str, str]:
    issuer = _take(raw, "issuer", where, values.exact_address, "")
    discovery = _take(raw, "discovery_url", where, values.exact_address, "")
    if not issuer and not discovery:
        raise _Mistake(where, "issuer", "is missing", "give issuer = \"https://…\", or discovery_url")  # fmt: skip
    if not issuer:
        if not discovery.endswith(DISCOVERY_PATH):
            raise _Mistake(where, "issuer", f"is missing, and discovery_url does not end in {DISCOVERY_PATH}")
        issuer = discovery.removesuffix(DISCOVERY_PATH)
    return {"issuer": issuer, "discovery_url": discovery or issuer.rstrip("/") + DISCOVERY_PATH}


def _allow(raw: dict[str, Any], where: str, kind: str) -> Allow:
    _only(raw, _ALLOW_KEYS, where)
    if kind == "github" and "groups_claim" in raw:
        raise _Mistake(where, "groups_claim", "means nothing at GitHub: groups are organisations there")
    return Allow(
        everybody=_take(raw, "everybody", where, values.flag, False),
        domains=_take(raw, "domains", where, values.domains, ()),
        emails=_take(raw, "emails", where, values.emails, ()),
        subjects=_take(raw, "subjects", where, values.words, ()),
        groups=_take(raw, "groups", where, values.words, ()),
        groups_claim=_take(raw, "groups_claim", where, values.text, "groups"),
        every_sign_in=_take(raw, "every_sign_in", where, values.flag, False),
    )


def _secret(raw: dict[str, Any], where: str, folder: Path, private: bool, env: Mapping[str, str]) -> str:
    """The client's secret, from wherever it is kept. No error shows any of it."""
    given = [key for key in ("client_secret", "client_secret_file", "client_secret_env") if key in raw]
    if len(given) > 1:
        raise _Mistake(where, given[1], f"is given beside {given[0]}: keep one of them")
    if not given:
        return ""
    said: str = _take(raw, given[0], where, values.text, None)
    if given[0] == "client_secret":
        if not private:
            raise _Mistake(
                where, "client_secret", "stands in a file that others can read",
                "chmod 600 the file, or keep the secret in one of its own: client_secret_file",
            )  # fmt: skip
        return said
    if given[0] == "client_secret_env":
        if not env.get(said, "").strip():
            raise _Mistake(where, "client_secret_env", f"the environment variable {said} is not set")
        return env[said].strip()
    path = folder / Path(said).expanduser()
    try:
        if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise _Mistake(where, "client_secret_file", f"others can read {path}", f"chmod 600 {path}")
        secret = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise _Mistake(where, "client_secret_file", f"{path} cannot be read: {reason}") from None
    if not secret:
        raise _Mistake(where, "client_secret_file", f"{path} is empty")
    return secret


def _only(raw: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in raw:
        if key not in known:
            raise _Mistake(where, key, f"is not known here; known: {', '.join(known)}")


def _table(raw: dict[str, Any], key: str, where: str) -> dict[str, Any]:
    found = raw.get(key, {})
    if not isinstance(found, dict):
        raise _Mistake(where, key, "must be a table")
    return found


def _take(raw: Mapping[str, Any], key: str, where: str, check: Callable[[Any], Any], default: Any) -> Any:
    """One value, checked; `default` None: it must be there."""
    if key not in raw:
        if default is None:
            raise _Mistake(where, key, "is missing")
        return default
    try:
        return check(raw[key])
    except ValueError as error:
        raise _Mistake(where, key, str(error)) from None


def _line_of(text: str, where: str, key: str) -> int:
    """The line a mistake is in, as well as can be told without a parser that keeps them; 0 when it cannot."""
    lines = text.splitlines()
    number = re.match(r"provider\[(\d+)\](\.allow)?", where)
    start, stop = 0, len(lines)
    headers = [at for at, line in enumerate(lines) if re.match(r"\s*\[", line)]
    if number:
        tables = [at for at in headers if re.match(r"\s*\[\[\s*provider\s*\]\]", lines[at])]
        if len(tables) <= int(number[1]):
            return 0
        start = tables[int(number[1])]
        stop = next((at for at in tables if at > start), len(lines))
    elif where:
        start = next((at for at in headers if re.match(rf"\s*\[\s*{re.escape(where)}\s*\]", lines[at])), 0)
    for at in range(start, stop):
        if re.match(rf"\s*\[*\s*\"?{re.escape(key)}\"?\s*[=\].]", lines[at]):
            return at + 1
    if number and number[2]:
        return next((at + 1 for at in range(start, stop) if "allow" in lines[at]), start + 1)
    return start + 1 if number else 0
