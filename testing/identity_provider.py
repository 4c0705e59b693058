"""An identity provider that lies when told to, in a process of its own: `python -m testing.identity_provider PORT`.

Speaks OpenID Connect for any number of tenants (``/one``, ``/two`` are issuers of their own) and, for a tenant used so,
GitHub's routes. It checks what a real one checks: client, secret, redirect address, PKCE, and that a code works once.
``POST /TENANT/control`` says who signs in there, and what is to be wrong (`Tenant` lists it). Whoever is sent to it is
signed in without being asked.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import secrets
import sys
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import ECKey, Key, OctKey, OKPKey, RSAKey

CLIENT_ID = "diamond"
CLIENT_SECRET = "a secret between two processes"  # noqa: S105 - of a provider that vouches for nobody
_GIANT = b'{"access_token": "' + b"x" * 4_000_000 + b'"}'
_HANG_S = 30.0


@dataclass
class Tenant:
    """What one issuer says. `faults` are names out of those that `_claims`, `_sign` and the routes look for."""

    sub: str = "subject-1"
    claims: dict[str, Any] = field(default_factory=dict)  # of the ID token and userinfo
    userinfo: dict[str, Any] = field(default_factory=dict)  # what only userinfo says
    metadata: dict[str, Any] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    alg: str = "RS256"
    github: dict[str, Any] = field(default_factory=dict)  # id, login, name, emails, orgs
    keys: list[Key] = field(default_factory=list)
    codes: dict[str, dict[str, str]] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)  # access token -> sub


def _new_key(alg: str) -> Key:
    kid = {"kid": secrets.token_hex(8), "use": "sig"}
    if alg.startswith("ES"):
        return ECKey.generate_key({"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}[alg], kid)
    if alg in ("EdDSA", "Ed25519"):
        return OKPKey.generate_key("Ed25519", kid)
    return RSAKey.generate_key(2048, kid)


_TENANTS: dict[str, Tenant] = {}
_LOCK = threading.Lock()


def _tenant(name: str) -> Tenant:
    with _LOCK:
        if name not in _TENANTS:
            _TENANTS[name] = Tenant()
        tenant = _TENANTS[name]
        if not tenant.keys:
            tenant.keys.append(_new_key(tenant.alg))
        return tenant


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_args: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("content-length", 0)))
        if self.headers.get("content-type", "").startswith("application/json"):
            return self._answer(json.loads(raw))
        self._answer({key: values[0] for key, values in parse_qs(raw.decode()).items()})

    def _answer(self, body: dict[str, Any]) -> None:
        parts = urlsplit(self.path)
        _, name, *rest = parts.path.split("/")
        route = "/".join(rest)
        tenant = _tenant(name)
        query = {key: values[0] for key, values in parse_qs(parts.query).items()}
        issuer = f"http://{self.headers['host']}/{name}"
        place = {"login/oauth/authorize": "authorize", "login/oauth/access_token": "token"}.get(route, route)
        if f"hang {place}" in tenant.faults:
            time.sleep(_HANG_S)
        if f"giant {place}" in tenant.faults:
            return self._send(200, _GIANT)
        if f"redirect {place}" in tenant.faults:
            return self._redirect(f"{issuer}/elsewhere")
        if f"error {place}" in tenant.faults:
            return self._json(500, {"error": "server_error"})
        if f"text {place}" in tenant.faults:
            return self._send(200, b"<html>not what you wanted</html>")
        if route == "control":
            return self._control(name, tenant, body)
        if route == ".well-known/openid-configuration":
            return self._json(200, self._metadata(issuer) | tenant.metadata)
        if route == "jwks":
            return self._json(200, self._jwks(tenant))
        if place == "authorize":
            return self._authorize(tenant, query, issuer)
        if place == "token":
            return self._token(tenant, body, issuer, is_github=place != route)
        if route == "userinfo":
            return self._userinfo(tenant)
        return self._github(tenant, route)

    def _control(self, name: str, tenant: Tenant, body: dict[str, Any]) -> None:
        """Set fields; ``{"new_key": true}`` rotates, ``{}`` changes nothing. Answers with what there is to know."""
        if body.pop("reset", False):
            tenant = _TENANTS[name] = Tenant(keys=tenant.keys, alg=tenant.alg)
        if body.pop("new_key", False) or body.get("alg", tenant.alg) != tenant.alg:
            tenant.keys = [_new_key(body.get("alg", tenant.alg))]
        for key, value in body.items():
            setattr(tenant, key, value)
        self._json(200, {"kid": tenant.keys[0].kid, "codes": list(tenant.codes)})

    @staticmethod
    def _metadata(issuer: str) -> dict[str, Any]:
        return {
            "issuer": issuer,
            "authorization_endpoint": f"{issuer}/authorize",
            "token_endpoint": f"{issuer}/token",
            "userinfo_endpoint": f"{issuer}/userinfo",
            "jwks_uri": f"{issuer}/jwks",
            "response_types_supported": ["code"],
            "subject_types_supported": ["public"],
            "id_token_signing_alg_values_supported": ["RS256"],
        }

    @staticmethod
    def _jwks(tenant: Tenant) -> dict[str, Any]:
        keys = [dict(key.as_dict(private=False)) for key in tenant.keys]
        if "shared key" in tenant.faults:
            keys.append(dict(_shared(tenant).as_dict(private=True)))
        if "odd keys" in tenant.faults:
            keys += [{"kty": "AKP", "kid": "new"}, {"kty": "RSA", "kid": "broken"}, "not a key"]  # type: ignore[list-item]
        return {"keys": keys}

    def _authorize(self, tenant: Tenant, query: dict[str, str], issuer: str) -> None:
        assert query["client_id"] == CLIENT_ID and query["response_type"] == "code", query
        assert query["code_challenge_method"] == "S256" and len(query["code_challenge"]) == 43, query
        code = secrets.token_urlsafe(16)
        tenant.codes[code] = query
        answer = {"code": code, "state": query["state"]}
        if "decline" in tenant.faults:
            answer = {"error": "access_denied", "state": query["state"]}
        if tenant.metadata.get("authorization_response_iss_parameter_supported") and "no iss" not in tenant.faults:
            answer["iss"] = issuer
        if "other iss" in tenant.faults:
            answer["iss"] = issuer + "-of-another"
        if "no code" in tenant.faults:
            del answer["code"]
        self._redirect(f"{query['redirect_uri']}?{urlencode(answer)}")

    def _token(self, tenant: Tenant, body: dict[str, str], issuer: str, *, is_github: bool) -> None:
        asked = tenant.codes.pop(body.get("code", ""), None)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(body.get("code_verifier", "").encode()).digest())
        failed = 200 if is_github else 400  # GitHub says 200 to everything here
        if not self._is_client(body):
            return self._json(failed, {"error": "invalid_client"})
        if asked is None or asked["redirect_uri"] != body.get("redirect_uri"):
            return self._json(failed, {"error": "invalid_grant"})
        if challenge.rstrip(b"=").decode() != asked["code_challenge"]:
            return self._json(failed, {"error": "invalid_grant", "error_description": "PKCE"})
        access = secrets.token_urlsafe(16)
        tenant.tokens[access] = tenant.sub
        answer = {"access_token": access, "token_type": "mac" if "odd token type" in tenant.faults else "Bearer"}
        if not is_github:
            answer["id_token"] = _id_token(tenant, asked, issuer, access)
        if "no id_token" in tenant.faults:
            del answer["id_token"]
        if "no access_token" in tenant.faults:
            del answer["access_token"]
        self._json(200, answer)

    def _is_client(self, body: dict[str, str]) -> bool:
        given = (body.get("client_id", ""), body.get("client_secret", ""))
        scheme, _, value = self.headers.get("authorization", "").partition(" ")
        if scheme == "Basic":
            name, _, secret = base64.b64decode(value).decode().partition(":")
            given = (name, secret)
        return given == (CLIENT_ID, CLIENT_SECRET)

    def _bearer(self, tenant: Tenant) -> str | None:
        return tenant.tokens.get(self.headers.get("authorization", "").removeprefix("Bearer "))

    def _userinfo(self, tenant: Tenant) -> None:
        sub = self._bearer(tenant)
        if sub is None:
            return self._json(401, {"error": "invalid_token"})
        said = {"sub": sub, **tenant.claims, **tenant.userinfo}
        if "other userinfo" in tenant.faults:
            said["sub"] = "somebody-else"
        if "nobody's userinfo" in tenant.faults:
            del said["sub"]
        self._json(200, said)

    def _github(self, tenant: Tenant, route: str) -> None:
        if self._bearer(tenant) is None:
            return self._json(401, {"message": "Bad credentials"})
        found = {
            "user": {key: tenant.github.get(key) for key in ("id", "login", "name")},
            "user/emails": tenant.github.get("emails", []),
            "user/orgs": [{"login": name} for name in tenant.github.get("orgs", [])],
        }.get(route)
        if found is None:
            return self._json(404, {"message": "Not Found"})
        self._json(200, found)

    def _json(self, status: int, body: Any) -> None:
        self._send(status, json.dumps(body).encode())

    def _send(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        try:
            self.wfile.write(data)
        except OSError:
            self.close_connection = True  # whoever asked has heard enough

    def _redirect(self, place: str) -> None:
        self.send_response(302)
        self.send_header("Location", place)
        self.send_header("Content-Length", "0")
        self.end_headers()


def _shared(tenant: Tenant) -> OctKey:
    return OctKey.import_key(hashlib.sha512(tenant.sub.encode()).hexdigest(), {"kid": "shared", "use": "sig"})


def _claims(tenant: Tenant, asked: dict[str, str], issuer: str, access: str) -> dict[str, Any]:
    now, faults = int(time.time()), tenant.faults
    digest = {"384": hashlib.sha384, "512": hashlib.sha512}.get(tenant.alg[2:], hashlib.sha256)
    half = (hashlib.sha512 if tenant.alg in ("EdDSA", "Ed25519") else digest)(access.encode()).digest()
    claims: dict[str, Any] = {
        "iss": issuer, "sub": tenant.sub, "aud": CLIENT_ID, "iat": now, "exp": now + 300,
        "nonce": asked.get("nonce", ""), **tenant.claims,
        "at_hash": base64.urlsafe_b64encode(half[: len(half) // 2]).rstrip(b"=").decode(),
    }  # fmt: skip
    wrong: dict[str, dict[str, Any]] = {
        "other nonce": {"nonce": "another"},
        "no nonce": {"nonce": None},
        "other aud": {"aud": "another-client"},
        "second aud": {"aud": [CLIENT_ID, "another-client"]},
        "other azp": {"azp": "another-client"},
        "expired": {"iat": now - 7200, "exp": now - 3600},
        "no exp": {"exp": None},
        "odd exp": {"exp": "for ever"},
        "from the future": {"iat": now + 3600, "exp": now + 7200},
        "other issuer": {"iss": issuer + "-of-another"},
        "no issuer": {"iss": None},
        "no subject": {"sub": None},
        "number as subject": {"sub": 17},
        "other at_hash": {"at_hash": base64.urlsafe_b64encode(b"0" * 16).rstrip(b"=").decode()},
    }
    for fault, changes in wrong.items():
        if fault in faults:
            claims.update(changes)
    return {key: value for key, value in claims.items() if value is not None}


def _packed(part: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode()


def _id_token(tenant: Tenant, asked: dict[str, str], issuer: str, access: str) -> str:
    claims, faults, key = _claims(tenant, asked, issuer, access), tenant.faults, tenant.keys[0]
    header = {"alg": tenant.alg, "kid": key.kid}
    if "no kid" in faults:
        del header["kid"]
    if "garbage" in faults:
        return "this.is.nothing"
    if "alg none" in faults:
        return f"{_packed({'alg': 'none'})}.{_packed(claims)}."
    if "public key as secret" in faults:
        # As a careless library would check it: the public key's own bytes are what HS256 is verified with.
        signed = f"{_packed({'alg': 'HS256', 'kid': key.kid})}.{_packed(claims)}"
        made = hmac.new(key.as_pem(private=False), signed.encode(), hashlib.sha256).digest()
        return f"{signed}.{base64.urlsafe_b64encode(made).rstrip(b'=').decode()}"
    if "shared key" in faults:
        return jwt.encode({"alg": "HS256", "kid": "shared"}, claims, _shared(tenant), algorithms=["HS256"])
    if "other key" in faults:
        key = _new_key(tenant.alg)  # under the name of the right one
    if "key in header" in faults:
        key = _new_key(tenant.alg)
        header = {"alg": tenant.alg, "jwk": key.as_dict(private=False), "kid": key.kid}
    token = jwt.encode(header, claims, key, algorithms=[tenant.alg])
    if "changed" in faults:
        head, _, signature = token.split(".")
        return f"{head}.{_packed({**claims, 'sub': 'admin'})}.{signature}"
    return token


def main() -> None:
    ThreadingHTTPServer.daemon_threads = True
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()


if __name__ == "__main__":
    main()
