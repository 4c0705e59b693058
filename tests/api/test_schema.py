"""Every route of the OpenAPI document is asked what its author did not think of, as each role.

No answer may be a 5xx, have a status or media type that the document does not name, or a body or headers outside their
schemas. Half of the requests fit the document and half break it in one place; half start from names and bodies that
exist (known.py).

Two checks schemathesis also has are left out. `positive_data_acceptance`: rules such as "a name of a user here" cannot
be said in a schema, so fitting requests are rightly refused. `negative_data_rejection`: the document describes what the
server writes, where every field is present; requests may leave out what has a default. What must be refused is in the
tests of each route.

The requests are the same at every run. DIAMOND_FUZZ_EXAMPLES asks for more of them per route and role.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from functools import cache
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from hypothesis.errors import UnsatisfiedAssumption
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks
from schemathesis.config import GenerationConfig, ProjectConfig, ProjectsConfig, SchemathesisConfig
from schemathesis.core.failures import FailureGroup
from schemathesis.core.parameters import ParameterLocation
from schemathesis.core.transport import Response

from diamond.server.services import tokens
from tests.api import known
from tests.api.installation import ROLES, Answer, Installation

EXAMPLES = int(os.environ.get("DIAMOND_FUZZ_EXAMPLES", "8"))
SAFE = ("GET", "HEAD")
LONGEST_WAIT_S = 0.02
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
_RANGES = (
    "",
    "bytes=0-",
    "bytes=1-3",
    "bytes=-2",
    "bytes=3-1",
    "bytes=999999-",
    "bytes=-0",
    "bytes=0-1,2-3",
    "lines=1-2",
)
_HOSTILE = (
    None, True, "", " ", 0, -1, 2**31, 2**53 + 1, 2**63 - 1, -(2**63), 1e308, -0.5, 1e-320, [], {}, [None], {"": None},
    "\0", "a\0b", "\ud800", "\n", "\r\nX: y", "x" * 5000, "../../etc/passwd", "/", "~", "a b", "-rf", "%00", "\u202e",
    "\ufeff", "\U0001f9ec" * 70, "'; DROP TABLE users; --", "$(id)", "NaN", "1e999", "9" * 400, "sha256:" + "0" * 64,
    "-1", "99999999999:00:00", "0000-00-00", "http://[", "https://user@host:99999/", "a@b", "alpha,", "task.*",
)  # fmt: skip
# Routes that a single request cannot make succeed here, and where they do.
_ELSEWHERE = {
    "POST /api/v1/setup": "there is an administrator already: tests/unit/server/test_accounts_api.py",
    "POST /api/v1/images/import": "takes an exported image: tests/unit/server/test_images_api.py",
    "GET /agent/ca.pem": "this server has no certificate of its own: tests/unit/server/test_api_enrolment.py",
}


def _labels() -> list[str]:
    return [f"{method.upper()} {path}" for path, methods in known.openapi()["paths"].items() for method in methods]


@cache
def _schema() -> Any:
    generation = GenerationConfig(deterministic=True, with_security_parameters=False)
    config = SchemathesisConfig(projects=ProjectsConfig(default=ProjectConfig(generation=generation)))
    return schemathesis.openapi.from_dict(known.openapi(), config=config)


@cache
def _checks() -> list[Any]:
    load_all_checks()
    return [CHECKS.get_one(name) for name in _CHECKS]


def _operation(label: str) -> Any:
    method, path = label.split(" ")
    return _schema()[path][method]


def _parameters(label: str) -> set[str]:
    return {parameter.name for parameter in _operation(label).query}


def _is_asked_something(operation: Any) -> bool:
    """Whether the document lets a request say anything, that could be wrong."""
    return any((operation.path_parameters, operation.query, operation.headers, operation.body))


def _cases(operation: Any, real: dict[str, str]) -> st.SearchStrategy[Any]:
    modes = [GenerationMode.POSITIVE, *([GenerationMode.NEGATIVE] if _is_asked_something(operation) else [])]
    anything = [operation.as_strategy(generation_mode=mode) for mode in modes]
    if not real:
        return st.one_of(anything)
    # A name that exists more often than not: all others end at "there is no such thing".
    existing = [operation.as_strategy(generation_mode=mode, path_parameters=real) for mode in modes]
    return st.one_of(*existing, *existing, *anything)


def _mixed(body: Any, accepted: Any, choose: Any) -> Any:
    """`accepted` with a few of its fields, at any depth, as `body` has them."""
    if isinstance(body, dict) and isinstance(accepted, dict) and body:
        taken = choose(st.lists(st.sampled_from(sorted(map(str, body))), min_size=1, max_size=2, unique=True))
        fields = {key: _mixed(body[key], accepted[key], choose) if key in accepted else body[key] for key in taken}
        return {**accepted, **fields}
    if isinstance(body, list) and isinstance(accepted, list) and body and accepted:
        return [_mixed(body[0], accepted[0], choose), *body[1:3]]
    return body


def _twisted(accepted: Any, choose: Any) -> Any:
    """`accepted` with one value, at any depth, that somebody hostile would send."""
    if isinstance(accepted, dict) and accepted:
        key = choose(st.sampled_from([*accepted]))
        return {**accepted, key: _twisted(accepted[key], choose)}
    if isinstance(accepted, list) and accepted:
        number = choose(st.integers(0, len(accepted) - 1))
        return [*accepted[:number], _twisted(accepted[number], choose), *accepted[number + 1 :]]
    return choose(st.sampled_from(_HOSTILE))


def _prepared(case: Any) -> requests.PreparedRequest:
    """The request on the wire; what no HTTP client can send is no case."""
    data = case.as_transport_kwargs(base_url="http://localhost")
    try:
        return requests.Request(**data).prepare()
    except (requests.RequestException, UnicodeError, ValueError):
        assume(False)
        raise


def _bounded(url: str) -> str:
    """Long polls answer soon: how long they may take is tested where they are."""
    parts = urlsplit(url)
    asked = parse_qsl(parts.query, keep_blank_values=True, errors="surrogateescape")
    if not any(name == "wait_s" and _is_long(value) for name, value in asked):
        return url
    short = [(name, str(LONGEST_WAIT_S) if name == "wait_s" and _is_long(value) else value) for name, value in asked]
    return parts._replace(query=urlencode(short, errors="surrogateescape")).geturl()


def _is_long(value: str) -> bool:
    try:
        return float(value) > LONGEST_WAIT_S
    except ValueError:
        return False


def _ask(installation: Installation, role: str, case: Any, raw: bytes | None = None) -> Answer:
    """Send it, with the body `raw` if there is one, and hold the answer against the document."""
    request = _prepared(case)
    if raw is not None:
        request.headers["Content-Type"] = "application/json"
        request.body = raw
    body = request.body or b""
    answer = installation.request(
        str(request.method),
        _bounded(str(request.url)),
        dict(request.headers),
        body if isinstance(body, bytes) else body.encode(),
        role,
    )
    if answer.status >= 500 and answer.error is not None:
        raise AssertionError(f"{role}: {case.as_curl_command()} body: {body[:2000]!r}") from answer.error
    headers: dict[str, list[str]] = {}
    for name, value in answer.headers:
        headers.setdefault(name, []).append(value)
    response = Response(
        status_code=answer.status,
        headers=headers,
        content=answer.body,
        request=request,
        elapsed=0.0,
        verify=False,
        stream_cut_short=answer.media_type == "text/event-stream",
    )
    case.validate_response(response, checks=_checks())
    return answer


def _fitting_role(installation: Installation, label: str) -> str:
    """Somebody whom the route serves when it is asked for what there is; the answer fits the document."""
    path = label.split(" ")[1]
    waits = {"wait_s": 0} if "wait_s" in _parameters(label) else {}
    answers = {}
    for role in ("user", "administrator", "agent", "anonymous"):
        installation.restore()
        accepted = known.bodies(installation).get(label)
        body = {} if accepted is None else {"body": accepted, "media_type": "application/json"}
        case = _operation(label).Case(
            path_parameters=known.path_parameters(installation, path),
            query={**known.query(label), **waits},
            headers=known.headers(label),
            **body,
        )
        answer = _ask(installation, role, case)
        if answer.status < 300:
            return role
        answers[role] = (answer.status, answer.body[:300])
    raise AssertionError(f"nobody may {label}: {answers}")


def _ask_all(installation: Installation, role: str, label: str, examples: int) -> None:
    operation = _operation(label)
    method, path = label.split(" ")
    if method not in SAFE:
        installation.restore()
    cases = _cases(operation, known.path_parameters(installation, path))
    accepted = known.bodies(installation).get(label)
    waits = any(parameter.name == "wait_s" for parameter in operation.query)
    is_file = "206" in operation.definition.raw["responses"]

    @settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(data=st.data())
    def ask(data: st.DataObject) -> None:
        case = data.draw(cases)
        how = data.draw(st.sampled_from(("mixed", "twisted", "as generated"))) if accepted is not None else ""
        raw = None
        if how == "mixed" and isinstance(case.body, dict):
            raw = json.dumps(_mixed(case.body, accepted, data.draw), default=str).encode()
        elif how == "twisted":
            raw = json.dumps(_twisted(accepted, data.draw)).encode()
        if data.draw(st.booleans()):
            case.query = {**(case.query or {}), **known.query(label)}
            case.headers.update(known.headers(label))
        if is_file:
            case.headers["Range"] = data.draw(st.sampled_from(_RANGES))
        if waits:
            case.query = {"wait_s": LONGEST_WAIT_S, **(case.query or {})}
        _ask(installation, role, case, raw)

    ask()


def test_every_route_that_takes_json_has_a_body_it_accepts(on_sqlite: Installation) -> None:
    on_sqlite.restore()
    takes_json = {
        f"{method.upper()} {path}"
        for path, methods in known.openapi()["paths"].items()
        for method, route in methods.items()
        if "application/json" in route.get("requestBody", {}).get("content", {})
    }
    assert takes_json == set(known.bodies(on_sqlite))


def test_routes_said_to_be_tested_elsewhere_exist() -> None:
    assert set(_ELSEWHERE) <= set(_labels())


@pytest.mark.parametrize("label", [label for label in _labels() if label not in _ELSEWHERE])
def test_what_is_known_is_accepted(on_sqlite: Installation, label: str) -> None:
    """Else every request of the suite would end at the door."""
    _fitting_role(on_sqlite, label)


@pytest.mark.parametrize("label", _labels())
@pytest.mark.parametrize("role", ROLES)
def test_no_surprises(on_sqlite: Installation, role: str, label: str) -> None:
    _ask_all(on_sqlite, role, label, EXAMPLES)


@pytest.mark.parametrize("label", _labels())
def test_boundaries(on_sqlite: Installation, label: str) -> None:
    """Every limit, type and missing field that the document names, one by one, asked by whom the route serves."""
    role = "user" if label in _ELSEWHERE else _fitting_role(on_sqlite, label)
    method, path = label.split(" ")
    on_sqlite.restore()
    real = known.path_parameters(on_sqlite, path)
    generation = GenerationConfig(deterministic=True, with_security_parameters=False)
    cases = _schema().iter_coverage_cases(
        _operation(label), generation_modes=list(GenerationMode), generation_config=generation
    )
    for case in cases:
        if case.method.upper() != method:
            continue  # methods a path does not have: tests/unit/server/test_errors.py
        if case.meta.phase.data.parameter_location != ParameterLocation.PATH:
            case.path_parameters = dict(real)
        case.headers.update(known.headers(label))
        if "wait_s" in _parameters(label):
            case.query = {"wait_s": LONGEST_WAIT_S, **(case.query or {})}
        with suppress(UnsatisfiedAssumption):
            _ask(on_sqlite, role, case)


@pytest.mark.postgres
@pytest.mark.parametrize("label", _labels())
def test_no_surprises_on_postgresql(on_postgresql: Installation, label: str) -> None:
    """PostgreSQL refuses NUL, half surrogates and large numbers where SQLite stores them."""
    role = "user" if label in _ELSEWHERE else _fitting_role(on_postgresql, label)
    _ask_all(on_postgresql, role, label, EXAMPLES)


@pytest.mark.parametrize("answer", [RuntimeError("a mistake of ours"), [{"id": 1}]])
def test_the_suite_would_notice(on_sqlite: Installation, monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    """A route that breaks, or answers something else than it says, fails it."""

    def wrong(*_args: Any, **_kwargs: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(tokens, "list_tokens", wrong)
    with pytest.raises((AssertionError, FailureGroup)):
        _ask_all(on_sqlite, "user", "GET /api/v1/tokens", 1)
