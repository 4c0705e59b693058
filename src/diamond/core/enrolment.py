"""How an agent becomes an endpoint's: a code that works once, exchanged for a token the agent made itself.

The agent makes its token, keeps it in a file, and tells the server only its SHA-256. So no answer that gets lost can
lose a token, every step may be repeated, and the token itself travels only as the credential it is.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
import shlex
from dataclasses import dataclass

AGENT_FILE = "diamond-agent.pyz"
AGENT_PATH = f"/agent/{AGENT_FILE}"
CA_PATH = "/agent/ca.pem"
CODE_VALID_S = 3600.0
ENDPOINT_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")
_LETTERS = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"  # Crockford's: nothing in it looks like something else
_CODE_CHARS = 12
_MISREAD = str.maketrans("OIL", "011")


def new_code(num_chars: int = _CODE_CHARS) -> str:
    """``XXXX-XXXX-XXXX``: five bits of chance a letter, short enough to be read aloud."""
    text = "".join(secrets.choice(_LETTERS) for _ in range(num_chars))
    return "-".join(text[start : start + 4] for start in range(0, num_chars, 4))


def plain_code(text: str, num_chars: int = _CODE_CHARS) -> str:
    """A code as it is compared, however it was typed. Empty when it cannot be one."""
    plain = re.sub(r"[\s-]+", "", text[:100]).upper().translate(_MISREAD)
    return plain if len(plain) == num_chars and all(char in _LETTERS for char in plain) else ""


def new_token() -> str:
    """A fresh agent token: 256 bits of chance."""
    return "dmda_" + secrets.token_urlsafe(32)


def token_hash(token: str) -> str:
    # Tokens carry 256 bits of chance, so a plain hash is enough: there is nothing to guess.
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """A code for one endpoint, and what an agent needs to reach the server and be sure of it."""

    endpoint: str
    code: str
    expires_at: float
    url: str = ""  # as the operator set it; empty: the address the client itself uses
    pin: str = ""  # SHA-256 of the authority's certificate; empty: one that every system knows, or plain HTTP
    names: tuple[str, ...] = ()  # what the server's own certificate names; empty: not known
    agent_sha256: str = ""  # of the one-file agent


@dataclass(frozen=True, kw_only=True)
class NewAgent:
    """Agent -> server, with the code instead of a token. POST /api/v1/enrolment"""

    code: str
    token_sha256: str
    instance: str
    hostname: str = ""
    take_over: bool = False  # the home that spoke for this endpoint is lost; its jobs are to be given up
    look: bool = False  # only say which endpoint the code is for; it stays valid


@dataclass(frozen=True, kw_only=True)
class Enrolled:
    endpoint_id: str
    endpoint_name: str
    server_version: str = ""


@dataclass(frozen=True, kw_only=True)
class AgentSelf:
    """What the server knows of the agent that asks. GET /api/v1/agent/me"""

    endpoint_id: str
    endpoint_name: str
    instance: str = ""
    server_version: str = ""
    agent_sha256: str = ""
    rotate: bool = False  # a new token is wanted


@dataclass(frozen=True, kw_only=True)
class NewToken:
    """Agent -> server: the digest of a token it will use from now on. PUT /api/v1/agent/token"""

    sha256: str


def enrolment_lines(enrolment: Enrolment, url: str) -> tuple[str, str]:
    """The line to paste on the login node, with curl and with Python alone. Both check what they fetched."""
    source = url.rstrip("/") + AGENT_PATH
    private = bool(enrolment.pin)
    # The digest in the line vouches for the file, so a certificate nobody knows yet need not.
    curl = ["curl", "-fsS" + ("k" if private else ""), source, "-o", AGENT_FILE]
    with_curl = f"{shlex.join(curl)} && echo {shlex.quote(f'{enrolment.agent_sha256}  {AGENT_FILE}')} | sha256sum -c -"
    context = ", context=ssl._create_unverified_context()" if private else ""
    program = (
        # JSON's text in double quotes is Python's too, and stays readable inside the shell's single ones.
        f"import hashlib, ssl, urllib.request as r; d = r.urlopen({json.dumps(source)}{context}).read(); "
        f'assert hashlib.sha256(d).hexdigest() == "{enrolment.agent_sha256}", "not the file that was promised"; '
        f'open("{AGENT_FILE}", "wb").write(d)'
    )
    with_python = shlex.join(["python3", "-c", program])
    argv = ["python3", AGENT_FILE, "enroll", url, "--code", enrolment.code]
    argv += ["--pin", enrolment.pin] if private else []
    then = shlex.join([*argv, "--start"])
    return f"{with_curl} && {then}", f"{with_python} && {then}"
