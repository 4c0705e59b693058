"""OpenID Connect, as a client: the code flow with PKCE.

Believes nothing it has not verified: an ID token's signature, issuer, audience, times and nonce, and that all that is
said of somebody in one sign-in is said of the same one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from authlib.oidc.core import CodeIDToken  # type: ignore[import-untyped]
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import JWKRegistry, Key
from joserfc.jws import JWSRegistry, extract_compact

from diamond.server.identity_file import ProviderConfig
from diamond.server.identity_values import check_address, is_inside
from diamond.server.provider_link import (
    MAX_TEXT,
    Attempt,
    Person,
    Refused,
    authorize_address,
    email_of,
    exchange,
    get,
    plain,
    trouble,
)

# Signatures by a key pair. Never "none"; never a shared key (HS256), which a public key could be passed off as.
ALGORITHMS = (
    "RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519",
)  # fmt: skip
LEEWAY_S = 60
_MAX_GROUPS = 2000
_KEEP_S = 3600.0  # discovery documents and keys
_LOOK_AGAIN_S = 30.0  # between two looks, when tokens are signed by no key that is known


class OpenIdConnect:
    """A provider that speaks OpenID Connect. Keeps its discovery document and keys for a while."""

    def __init__(self, config: ProviderConfig, clock: Callable[[], float] = time.time) -> None:
        self.config = config
        self._clock = clock
        self._found: tuple[float, dict[str, Any]] | None = None
        self._keys: tuple[float, list[Key]] | None = None
        self._looked_again_at = 0.0

    async def address(self, attempt: Attempt, *, linking: bool = False) -> str:
        place = (await self._metadata())["authorization_endpoint"]
        extra = {"prompt": self.config.link_prompt} if linking and self.config.link_prompt else {}
        return authorize_address(self.config, place, attempt, nonce=attempt.nonce, **extra)

    async def check_issuer(self, given: str | None) -> None:
        metadata = await self._metadata()
        if given is None and metadata.get("authorization_response_iss_parameter_supported") is True:
            raise Refused("issuer", f"the answer does not say that it is from {self.config.title}, which always does")
        if given is not None and given != self.config.issuer:
            raise Refused("issuer", f"the answer is from another provider than {self.config.title}")

    async def person(self, attempt: Attempt, code: str) -> Person:
        metadata = await self._metadata()
        tokens = await exchange(self.config, metadata["token_endpoint"], self._auth_method(metadata), attempt, code)
        claims = await self._verified(tokens, attempt.nonce)
        if metadata.get("userinfo_endpoint"):
            more = await get(self.config, metadata["userinfo_endpoint"], tokens["access_token"])
            if not isinstance(more, dict) or more.get("sub") != claims["sub"]:
                raise Refused("userinfo", f"{self.config.title} speaks of two different people in one sign-in")
            claims = {**more, **claims, **_email_claims(claims, more)}
        return _person(self.config, claims)

    def _auth_method(self, metadata: dict[str, Any]) -> str:
        if not self.config.client_secret:
            return "none"
        known = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        for method in ("client_secret_basic", "client_secret_post"):
            if method in known:
                return method
        raise trouble(self.config, "it takes a client's secret neither as `basic` nor as `post`")

    async def _metadata(self) -> dict[str, Any]:
        now = self._clock()
        if self._found and now - self._found[0] < _KEEP_S:
            return self._found[1]
        found = await get(self.config, self.config.discovery_url)
        if not isinstance(found, dict) or found.get("issuer") != self.config.issuer:
            raise trouble(
                self.config, f"the document at {self.config.discovery_url} does not speak for {self.config.issuer}"
            )
        needed = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        for key in (*needed, *(key for key in ("userinfo_endpoint",) if key in found)):
            try:
                url = check_address(found.get(key))
            except ValueError as error:
                raise trouble(self.config, f"{key} in its discovery document {error}") from None
            if is_inside(url) and not is_inside(self.config.issuer):
                raise trouble(self.config, f"{key} in its discovery document leads inside this network")
        self._found = (now, found)
        return found

    async def _verified(self, tokens: dict[str, Any], nonce: str) -> dict[str, Any]:
        """The claims of the ID token, if it is one, for us, from this provider, now, for this sign-in."""
        value = tokens.get("id_token")
        if not isinstance(value, str) or not value.isascii():
            raise Refused("id_token", f"{self.config.title} gave no ID token")
        registry = _Registry(algorithms=ALGORITHMS, strict_check_header=False)
        header = _header(value, registry)
        if header.get("alg") not in ALGORITHMS:
            raise Refused("algorithm", "the ID token is not signed in a way that is accepted")
        token = await self._signed(value, header, registry)
        options = {
            "iss": {"essential": True, "value": self.config.issuer},
            "aud": {"essential": True, "value": self.config.client_id},
            "sub": {"essential": True},
            "nonce": {"essential": True, "value": nonce},
        }
        params = {"client_id": self.config.client_id, "nonce": nonce, "access_token": tokens["access_token"]}
        # at_hash names its function by the algorithm; RFC 9864's name of EdDSA is not among those that are known there
        known_header = {**token.header, "alg": "EdDSA" if token.header["alg"] == "Ed25519" else token.header["alg"]}
        claims = CodeIDToken(token.claims, known_header, options, params)
        try:
            claims.validate(now=int(self._clock()), leeway=LEEWAY_S)
        except (JoseError, TypeError, ValueError) as error:
            name = plain(getattr(error, "claim", "") or getattr(error, "error", "")) or "claims"
            raise Refused(name, f"the ID token of {self.config.title} is not valid: {name}") from None
        if not isinstance(claims["sub"], str) or not 0 < len(claims["sub"]) <= 255:
            raise Refused("sub", f"the ID token of {self.config.title} is not valid: sub")
        return dict(claims)

    async def _signed(self, value: str, header: dict[str, Any], registry: JWSRegistry) -> jwt.Token:
        """The token, if a key of the provider signed it. One that is not known may have come since we looked."""
        for fresh in (False, True):
            keys = await self._jwks(fresh=fresh)
            for key in _fitting(keys, header):
                try:
                    return jwt.decode(value, key, registry=registry)
                except (JoseError, ValueError, TypeError):
                    continue
        raise Refused("signature", f"the ID token is not signed by a key of {self.config.title}")

    async def _jwks(self, *, fresh: bool) -> list[Key]:
        now = self._clock()
        if self._keys and (now - self._looked_again_at < _LOOK_AGAIN_S if fresh else now - self._keys[0] < _KEEP_S):
            return self._keys[1]
        if fresh:
            self._looked_again_at = now
        found = await get(self.config, (await self._metadata())["jwks_uri"])
        listed = found.get("keys") if isinstance(found, dict) else None
        keys = []
        for item in listed if isinstance(listed, list) else []:
            # Only public keys: a shared one would let whoever reads the list sign tokens.
            if isinstance(item, dict) and item.get("kty") in ("RSA", "EC", "OKP") and item.get("use", "sig") == "sig":
                try:
                    keys.append(JWKRegistry.import_key(item))
                except (JoseError, ValueError, TypeError, KeyError):
                    continue
        self._keys = (now, keys)
        return keys


class _Registry(JWSRegistry):
    max_header_length = 8192  # some providers put their certificates into it


def _header(value: str, registry: JWSRegistry) -> dict[str, Any]:
    try:
        return dict(extract_compact(value.encode(), registry=registry).headers())
    except (JoseError, ValueError, TypeError):
        raise Refused("id_token", "what the provider gave as ID token is none") from None


def _fitting(keys: list[Key], header: dict[str, Any]) -> list[Key]:
    kid, alg = header.get("kid"), str(header.get("alg"))
    kind = {"RS": "RSA", "PS": "RSA", "ES": "EC"}.get(alg[:2], "OKP")
    return [
        key
        for key in keys
        if key.key_type == kind and (kid is None or key.kid in (None, kid)) and key.get("alg", alg) == alg
    ]


def _email_claims(token: dict[str, Any], userinfo: dict[str, Any]) -> dict[str, Any]:
    """The address, and whether it is verified, from one mouth: neither vouches for what the other says."""
    source = token if "email" in token else userinfo
    verified = source.get("email_verified")
    if verified is None and email_of(token.get("email")) == email_of(userinfo.get("email")):
        verified = userinfo.get("email_verified")
    return {"email": source.get("email"), "email_verified": verified}


def _person(config: ProviderConfig, claims: dict[str, Any]) -> Person:
    is_verified = claims.get("email_verified") is True or claims.get("email_verified") == "true"
    email = email_of(claims.get("email")) if is_verified else ""
    addresses = [email_of(claims.get(claim)) for claim in config.address_claims]
    addresses += [email] if config.email_domains else []
    domains = {address.rpartition("@")[2] for address in addresses}
    domains |= {plain(claims.get(claim)).lower() for claim in config.domain_claims}
    groups = claims.get(config.allow.groups_claim)
    listed = groups[:_MAX_GROUPS] if isinstance(groups, list) else [groups]
    name = plain(claims.get("preferred_username"))
    full_name = plain(claims.get("name")) or " ".join(
        text for text in (plain(claims.get("given_name")), plain(claims.get("family_name"))) if text
    )
    shown = email_of(claims.get("email"))
    suggestions = (name.partition("@")[0], shown.partition("@")[0], full_name)
    return Person(
        issuer=config.issuer,
        subject=claims["sub"],
        label=shown or name or full_name or claims["sub"][:MAX_TEXT],
        full_name=full_name,
        email=email,
        domains=frozenset(domains) - {""},
        groups=frozenset(plain(item) for item in listed) - {""},
        suggestions=tuple(text for text in suggestions if text),
    )
