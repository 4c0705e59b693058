"""GET /: says that Diamond runs here, and what to type. Shows nothing of anybody's: it needs no token."""

from __future__ import annotations

import base64
import hashlib
from html import escape
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse, Response

import diamond

router = APIRouter(include_in_schema=False)

_CSS = (Path(__file__).parent / "landing.css").read_text()
_CSS_HASH = base64.b64encode(hashlib.sha256(_CSS.encode()).digest()).decode()
_PAGE = f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Diamond</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1><svg viewBox="0 0 24 24" aria-hidden="true"><path d="M6 4h12l4 6-10 11L2 10z M2 10h20 M8.5 10 12 21l3.5-11"/></svg>
Diamond is running</h1>
<p>Version {escape(diamond.__version__)}. Train any model, with any dataset, on any machine.</p>
<h2>Launch something</h2>
<pre tabindex="0" aria-label="Commands to launch a task"><code>echo 'run: echo hello from $HOSTNAME' &gt; task.yaml
diamond launch task.yaml
diamond logs -f</code></pre>
<h2>See how it stands</h2>
<pre tabindex="0" aria-label="Commands to look at tasks"><code>diamond ps
diamond queue</code></pre>
<p>For programs: <a href="/openapi.json">the API, as OpenAPI</a>.</p>
</main>
</body>
</html>
"""
_HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{_CSS_HASH}'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


@router.head("/")
@router.get("/")
async def landing() -> Response:
    return HTMLResponse(_PAGE, headers=_HEADERS)
