"""The private authority behind a server, fetched before anything of it can be believed."""

from __future__ import annotations

import httpx

from diamond.core.enrolment import CA_PATH
from diamond.core.errors import ServerUnreachable
from diamond.core.tls import blind_context, first_certificate, pin_of

_MAX_BYTES = 256 * 1024


def fetch_authority(url: str, *, timeout_s: float = 10.0) -> tuple[str, str]:
    """The certificate (PEM) that the server names as its authority, and its pin.

    Nothing secret is sent, and nothing that came may be believed: compare the pin with what somebody you trust says.

    Raises:
        ServerUnreachable: nobody answers there, or not with a certificate.
    """
    try:
        with (
            httpx.Client(verify=blind_context(), timeout=timeout_s) as http,
            http.stream("GET", url.rstrip("/") + CA_PATH) as answer,
        ):
            data = b""
            for chunk in answer.iter_bytes():
                data += chunk
                if len(data) > _MAX_BYTES:
                    raise ValueError("too long")
            if answer.status_code != httpx.codes.OK:
                raise ValueError(f"status {answer.status_code}")
        pem = first_certificate(data.decode("ascii"))
        return pem, pin_of(pem)
    except (httpx.HTTPError, ValueError) as error:
        raise ServerUnreachable(
            f"{url} does not say which authority signed its certificate",
            hint="get the authority's certificate from the server's operator: diamond login URL --ca FILE",
        ) from error
