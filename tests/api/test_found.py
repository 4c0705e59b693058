"""What the requests of test_schema.py found, each as one plain request."""

from __future__ import annotations

import json

import pytest

from tests.api import known
from tests.api.installation import BLOB, BLOB_DIGEST, Installation


@pytest.mark.parametrize("given", ["", " ", "bytes=", "bytes=a-b", "bytes=0-1,3-4", "lines=1-2"])
def test_what_is_no_range_gets_the_whole_file(on_sqlite: Installation, given: str) -> None:
    """An empty one was answered with 400 and plain text."""
    url = f"http://localhost/api/v1/blobs/{BLOB_DIGEST}"
    answer = on_sqlite.request("GET", url, {"Range": given}, b"", "user")
    assert (answer.status, answer.body) == (200, BLOB)


@pytest.mark.parametrize("given", ["bytes=999999-", "bytes=3-1", "bytes=-0"])
def test_a_range_outside_the_file_is_in_the_document(on_sqlite: Installation, given: str) -> None:
    url = f"http://localhost/api/v1/blobs/{BLOB_DIGEST}"
    answer = on_sqlite.request("GET", url, {"Range": given}, b"", "user")
    assert (answer.status, answer.json()["error"]["code"]) == (416, "invalid_input")
    for path, methods in known.openapi()["paths"].items():
        for route in methods.values():
            assert ("206" in route["responses"]) == ("416" in route["responses"]), path


def test_a_body_that_is_too_large_is_in_the_document(on_sqlite: Installation) -> None:
    """413 (and 408 for one that never comes) is answered before a route is asked, so every route that takes one."""
    on_sqlite.restore()
    large = json.dumps({"x": "x" * on_sqlite.settings.max_json_bytes}).encode()
    for label in known.bodies(on_sqlite):
        method, path = label.split(" ")
        documented = known.openapi()["paths"][path][method.lower()]["responses"]
        assert {"408", "413"} <= set(documented), label
        url = "http://localhost" + path.format(**known.path_parameters(on_sqlite, path))
        for role in ("user", "agent"):
            answer = on_sqlite.request(method, url, {"Content-Type": "application/json"}, large, role)
            assert str(answer.status) in documented, (label, answer.status)
            assert answer.json()["error"]["message"]


def test_a_name_with_a_slash_is_in_the_document(on_sqlite: Installation) -> None:
    """Such a name never reaches the route of its path: 404, or another route's answer."""
    for path, methods in known.openapi()["paths"].items():
        if "{" in path:
            assert all("404" in route["responses"] for route in methods.values()), path
    answer = on_sqlite.request("DELETE", "http://localhost/api/v1/shells/a%2Fb", {}, b"", "user")
    assert (answer.status, answer.json()["error"]["code"]) == (404, "not_found")
