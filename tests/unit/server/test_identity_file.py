"""identity.toml: what it may say, and that every mistake in it is named."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

from diamond.core.errors import InstallationProblem, NotFound
from diamond.server.identity_file import IdentityConfig, load, parse
from diamond.server.identity_providers import IdentityProviders
from diamond.server.identity_values import check_address
from diamond.server.settings import load_settings

LAB = """
[[provider]]
name = "lab"
issuer = "https://login.example.org/realms/lab"
client_id = "diamond"
client_secret_env = "LAB_SECRET"
"""


def read(text: str, *, folder: Path = Path("/nowhere"), private: bool = False, **environment: str) -> IdentityConfig:
    env = {"LAB_SECRET": "s3cret", **environment}
    return parse(text, path=folder / "identity.toml", private=private, environment=env)


def mistake(text: str, **more: Any) -> InstallationProblem:
    with pytest.raises(InstallationProblem) as info:
        read(text, **more)
    assert info.value.hint
    return info.value


def test_without_a_file_there_are_local_accounts_alone(tmp_path: Path) -> None:
    assert load(load_settings(home=tmp_path)) == IdentityConfig(local_accounts=True, providers=())


def test_the_file_is_found_in_the_home_folder_or_where_it_is_said_to_be(tmp_path: Path) -> None:
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "identity.toml").write_text(LAB.replace("client_secret_env", "#"))
    assert load(load_settings(home=tmp_path)).providers[0].name == "lab"
    elsewhere = tmp_path / "mine.toml"
    elsewhere.write_text("[accounts]\nlocal = true\n")
    assert load(load_settings(home=tmp_path, identity_file=str(elsewhere))).providers == ()
    with pytest.raises(InstallationProblem, match="does not exist") as info:
        load(load_settings(home=tmp_path, identity_file=str(tmp_path / "none.toml")))
    assert info.value.field == "identity_file"


def test_an_issuer_of_ones_own() -> None:
    (lab,) = read(LAB).providers
    assert (lab.kind, lab.title, lab.client_secret) == ("oidc", "lab", "s3cret")
    assert lab.discovery_url == "https://login.example.org/realms/lab/.well-known/openid-configuration"
    assert lab.scopes == ("openid", "profile", "email")
    assert not lab.create_accounts  # until somebody says for whom
    assert "s3cret" not in repr(lab)


def test_an_issuer_by_its_discovery_address() -> None:
    address = "https://login.example.org/realms/lab/.well-known/openid-configuration"
    (lab,) = read(
        LAB.replace('issuer = "https://login.example.org/realms/lab"', f'discovery_url = "{address}"')
    ).providers
    assert lab.issuer == "https://login.example.org/realms/lab"


@pytest.mark.parametrize(
    ("name", "issuer", "claims"),
    [
        ("globus", "https://auth.globus.org", ("preferred_username",)),
        ("cilogon", "https://cilogon.org", ("eppn",)),
        ("orcid", "https://orcid.org", ()),
        ("google", "https://accounts.google.com", ("hd",)),
        ("github", "https://github.com", ()),
    ],
)
def test_those_everybody_knows_need_a_name_and_a_client(name: str, issuer: str, claims: tuple[str, ...]) -> None:
    text = f'[[provider]]\nname = "{name}"\nclient_id = "d"\nclient_secret_env = "LAB_SECRET"\n'
    (found,) = read(text + 'allow = { subjects = ["1"] }\n').providers
    assert (found.issuer, found.domain_claims + found.address_claims, found.create_accounts) == (issuer, claims, True)
    assert found.email_domains == (name != "google")
    assert "client_secret_file: is missing" in mistake(text.replace('client_secret_env = "LAB_SECRET"', "")).message


def test_github_asks_for_organisations_only_where_they_count() -> None:
    text = '[[provider]]\nname = "github"\nclient_id = "d"\nclient_secret_env = "LAB_SECRET"\n'
    assert read(text).providers[0].scopes == ("read:user", "user:email")
    assert read(text + 'allow = { groups = ["lab"] }').providers[0].scopes == ("read:user", "user:email", "read:org")


def test_all_that_can_be_said() -> None:
    config = read(
        "[accounts]\nlocal = false\n" + LAB + 'title = "The Laboratory"\nscopes = ["openid", "groups"]\n'
        'create_accounts = true\ndomain_claims = ["schac_home"]\nlink_prompt = "login"\ntimeout_s = 3\n'
        '[provider.allow]\ndomains = ["Example.org", "*.example.org"]\nemails = ["Bob@Example.org"]\n'
        'subjects = ["x"]\ngroups = ["g"]\ngroups_claim = "roles"\nevery_sign_in = true\n'
    )  # fmt: skip
    (lab,) = config.providers
    assert not config.local_accounts
    assert (lab.title, lab.scopes, lab.timeout_s, lab.link_prompt) == (
        "The Laboratory",
        ("openid", "groups"),
        3.0,
        "login",
    )
    assert (lab.allow.domains, lab.allow.emails) == (("example.org", "*.example.org"), ("bob@example.org",))
    assert (lab.allow.subjects, lab.allow.groups, lab.allow.groups_claim) == (("x",), ("g",), "roles")
    assert lab.allow.every_sign_in


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ("[accounts\n", None, "is not TOML"),
        ("[accounts]\nlocal = 1\n", 2, "accounts.local: must be true or false"),
        ("[accounts]\nlocal = false\n", 2, "nobody could sign in"),
        ("[acounts]\nlocal = false\n", 1, "acounts: is not known here; known: accounts, provider"),
        ('[provider]\nname = "x"\n', 1, "two brackets"),
        (LAB + "secret = 1\n", 7, "provider[0].secret: is not known here"),
        (LAB.replace('"lab"', '"La b"'), 3, "provider[0].name: must be"),
        (LAB.replace('"lab"', '"password"'), 3, "provider[0].name: must be"),
        (LAB + LAB, 9, "provider[1].name: 'lab' is there twice"),
        (LAB + LAB.replace('"lab"', '"two"'), 10, "provider[1].issuer: https://login.example.org/"),
        (LAB.replace("https://", "http://"), 4, "provider[0].issuer: must begin with https://"),
        (LAB.replace("https://login.example.org", "login.example.org"), 4, "is not an address"),
        (LAB.replace("issuer", "#"), 2, "provider[0].issuer: is missing"),
        (LAB.replace("issuer", "discovery_url"), 2, "does not end in /.well-known/openid-configuration"),
        (LAB.replace("client_id", "#"), 2, "provider[0].client_id: is missing"),
        (LAB.replace('"diamond"', "7"), 5, "provider[0].client_id: must be text"),
        (LAB + 'kind = "saml"\n', 7, 'must be "oidc" or "github"'),
        (LAB + 'scopes = ["profile"]\n', 7, 'must hold "openid"'),
        (LAB + 'scopes = "openid"\n', 7, "must be a list"),
        (LAB + "create_accounts = true\n", 7, "`allow` names nobody"),
        (LAB + 'allow = ["example.org"]\n', 7, "provider[0].allow: must be a table"),
        (LAB + 'allow = { domain = ["example.org"] }\n', 7, "provider[0].allow.domain: is not known here"),
        (LAB + 'allow = { domains = ["bob@example.org"] }\n', 7, "is not a domain"),
        (LAB + 'allow = { domains = ["*"] }\n', 7, "is not a domain"),
        (LAB + 'allow = { emails = ["example.org"] }\n', 7, "is not an address"),
        (LAB + 'web_url = "https://github.example.org"\n', 7, "means nothing for a provider of kind 'oidc'"),
        (LAB + "timeout_s = 0\n", 7, "0.1 to 60"),
        (LAB + 'link_prompt = "none"\n', 7, "provider[0].link_prompt"),
        (LAB + 'client_secret = "x"\n', 6, "is given beside client_secret: keep one of them"),
        (LAB.replace("LAB_SECRET", "UNSET"), 6, "the environment variable UNSET is not set"),
        (LAB.replace("client_secret_env", "client_secret_file"), 6, "cannot be read: No such file"),
        (LAB.replace("client_secret_env", "client_secret"), 6, "a file that others can read"),
    ],
)  # fmt: skip
def test_mistakes_are_named(text: str, line: int | None, says: str) -> None:
    error = mistake(text)
    assert says in error.message
    if line is not None:
        assert f"identity.toml, line {line}: " in error.message


def test_a_secret_may_stand_in_a_file_nobody_else_reads(tmp_path: Path) -> None:
    text = LAB.replace('client_secret_env = "LAB_SECRET"', 'client_secret = "in here"')
    assert read(text, private=True).providers[0].client_secret == "in here"
    (tmp_path / "server").mkdir()
    path = tmp_path / "server" / "identity.toml"
    path.write_text(text)
    path.chmod(0o640)
    with pytest.raises(InstallationProblem, match="others can read") as info:
        load(load_settings(home=tmp_path))
    assert "in here" not in str(info.value)
    path.chmod(0o600)
    assert load(load_settings(home=tmp_path)).providers[0].client_secret == "in here"


def test_a_secret_in_a_file_of_its_own(tmp_path: Path) -> None:
    text = LAB.replace('client_secret_env = "LAB_SECRET"', 'client_secret_file = "lab.secret"')
    secret = tmp_path / "lab.secret"
    secret.write_text("of its own\n")
    secret.chmod(0o644)
    assert "others can read" in mistake(text, folder=tmp_path).message
    secret.chmod(stat.S_IRUSR)
    assert read(text, folder=tmp_path).providers[0].client_secret == "of its own"
    secret.chmod(0o600)
    secret.write_text("\n")
    assert "is empty" in mistake(text, folder=tmp_path).message


@pytest.mark.parametrize(
    "url",
    [
        "javascript:alert(1)", "file:///etc/passwd", "http://login.example.org", "https://", "https://a b",
        "//host/path", "https://user:word@host/", "https://host/#part", "https://höst/", "https://host:port/", None, 7, "https://h\n",
        "http://127.0.0.1.example.org/",
    ],
)  # fmt: skip
def test_addresses_that_are_not_asked(url: object) -> None:
    with pytest.raises(ValueError, match=r"address|https"):
        check_address(url)


@pytest.mark.parametrize(
    "url", ["https://a.example/x?y=1", "http://127.0.0.1:9/x", "http://[::1]:9", "http://localhost"]
)
def test_addresses_that_are(url: str) -> None:
    assert check_address(url) == url


def test_providers_are_found_by_name() -> None:
    found = IdentityProviders(read(LAB))
    assert found.get("lab").config.client_id == "diamond"
    with pytest.raises(NotFound, match="no identity provider"):
        found.get("elsewhere")
