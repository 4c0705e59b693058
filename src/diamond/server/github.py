"""GitHub, or a GitHub Enterprise server: OAuth without ID tokens, so it is asked about whoever has the access token."""

from __future__ import annotations

from diamond.server.identity_file import ProviderConfig
from diamond.server.provider_link import (
    Attempt,
    Person,
    Refused,
    authorize_address,
    email_of,
    exchange,
    get,
    plain,
)


class GitHub:
    def __init__(self, config: ProviderConfig) -> None:
        self.config = config

    async def address(self, attempt: Attempt, *, linking: bool = False) -> str:
        extra = {"prompt": "select_account"} if linking else {}
        return authorize_address(self.config, f"{self.config.web_url}/login/oauth/authorize", attempt, **extra)

    async def check_issuer(self, given: str | None) -> None:
        if given is not None and given not in (self.config.issuer, f"{self.config.web_url}/login/oauth"):
            raise Refused("issuer", f"the answer is from another provider than {self.config.title}")

    async def person(self, attempt: Attempt, code: str) -> Person:
        config = self.config
        place = f"{config.web_url}/login/oauth/access_token"
        tokens = await exchange(config, place, "client_secret_post", attempt, code)
        token = tokens["access_token"]
        kind = {"Accept": "application/vnd.github+json"}
        user = await get(config, f"{config.api_url}/user", token, **kind)
        number = user.get("id") if isinstance(user, dict) else None
        if isinstance(number, bool) or not isinstance(number, int) or number <= 0:
            raise Refused("userinfo", f"{config.title} does not say who signed in")
        emails = await get(config, f"{config.api_url}/user/emails", token, **kind)
        email = next((found for item in emails if (found := _primary(item))), "") if isinstance(emails, list) else ""
        groups: list[str] = []
        if config.allow.groups:
            organisations = await get(config, f"{config.api_url}/user/orgs?per_page=100", token, **kind)
            if isinstance(organisations, list):
                groups = [plain(item.get("login")) for item in organisations if isinstance(item, dict)]
        login = plain(user.get("login"))
        return Person(
            issuer=config.issuer,
            subject=str(number),
            label=login,
            full_name=plain(user.get("name")),
            email=email,
            domains=frozenset({email.rpartition("@")[2]} - {""}),
            groups=frozenset(groups) - {""},
            suggestions=tuple(text for text in (login, email.partition("@")[0]) if text),
        )


def _primary(item: object) -> str:
    if isinstance(item, dict) and item.get("primary") is True and item.get("verified") is True:
        return email_of(item.get("email"))
    return ""
