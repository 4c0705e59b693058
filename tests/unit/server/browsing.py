"""A browser without a screen: cookies, forms as the page has them, and no redirect followed unseen."""

from __future__ import annotations

from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import Any

import httpx
from fastapi import FastAPI


@dataclass
class Form:
    action: str
    method: str
    fields: dict[str, str] = field(default_factory=dict)


class _Forms(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.forms: list[Form] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        if tag == "form":
            self.forms.append(Form(found.get("action") or "", (found.get("method") or "get").lower()))
            self._open = True
        elif tag == "input" and self._open and found.get("name"):
            self.forms[-1].fields[str(found["name"])] = found.get("value") or ""

    def handle_endtag(self, tag: str) -> None:
        if tag == "form":
            self._open = False


def forms_in(page: str) -> dict[str, Form]:
    """The forms of a page by where they go."""
    parser = _Forms()
    parser.feed(page)
    return {form.action: form for form in parser.forms}


class Browser:
    """One browser's cookies. `base_url` decides whether it speaks HTTPS."""

    def __init__(
        self, app: FastAPI, base_url: str = "http://localhost", *, client: str = "127.0.0.1", **headers: str
    ) -> None:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, client=(client, 40000))
        self.base_url = base_url
        self.http = httpx.AsyncClient(transport=transport, base_url=base_url, headers=headers, timeout=30)

    async def get(self, path: str, **more: Any) -> httpx.Response:
        return await self.http.get(path, **more)

    async def submit(self, path: str, action: str, /, headers: dict[str, str] | None = None, **fields: str) -> Any:
        """Open a page, fill in one of its forms and send it, as a browser does."""
        page = await self.get(path)
        assert page.status_code == 200, (page.status_code, page.text)
        form = forms_in(page.text)[action]
        assert form.method == "post"
        assert set(fields) <= set(form.fields), f"{set(fields) - set(form.fields)} not in the form"
        sent = {"Origin": self.base_url, "Sec-Fetch-Site": "same-origin", **(headers or {})}
        return await self.http.post(action, data=form.fields | fields, headers=sent)

    async def sign_in(self, name: str, password: str, **fields: str) -> httpx.Response:
        answer: httpx.Response = await self.submit("/sign-in", "/sign-in", name=name, password=password, **fields)
        return answer

    @property
    def session(self) -> str:
        return self.http.cookies.get("diamond_session", "") or self.http.cookies.get("__Host-diamond_session", "")
