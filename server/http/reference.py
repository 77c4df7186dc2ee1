"""GET /docs: the API as one page of plain HTML, made from its OpenAPI description. It loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi import Request as HTTPRequest
from fastapi.responses import HTMLResponse

router = APIRouter()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code { font: 0.9em ui-monospace, monospace; }
table { border-collapse: collapse; width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 1rem 0.2rem 0; border-bottom: 1px solid #8884; }
:root { color-scheme: light dark; }
"""


@router.get("/docs", include_in_schema=False)
async def reference(http: HTTPRequest) -> HTMLResponse:
    """The page."""
    app: FastAPI = http.app
    headers = {"Content-Security-Policy": _POLICY, "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(page_of(app.openapi()), headers=headers)


def page_of(api: Mapping[str, Any]) -> str:
    """Return an OpenAPI description as a page: each route, and the fields of its body."""
    title = escape(f"{api['info']['title']} {api['info']['version']}")
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>The same as JSON: <a href='openapi.json'>openapi.json</a>.</p>"
        f"{''.join(_routes(api))}<h2>Objects</h2>{''.join(_objects(api))}</body></html>"
    )


def _routes(api: Mapping[str, Any]) -> Iterator[str]:
    for path, methods in api["paths"].items():
        for method, route in methods.items():
            yield f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(route.get('description', ''))}</p>"
            if "requestBody" in route:
                schema = next(iter(route["requestBody"]["content"].values()))["schema"]
                yield f"<p>Body: {_kind(schema)}</p>"


def _objects(api: Mapping[str, Any]) -> Iterator[str]:
    for name, schema in api["components"]["schemas"].items():
        if "properties" not in schema or name.endswith("ValidationError"):
            continue
        yield f"<h3 id='{escape(name)}'>{escape(name)}</h3><p>{escape(schema.get('description', ''))}</p>"
        yield "<table><tr><th>field</th><th>type</th><th></th></tr>"
        for field, value in schema["properties"].items():
            needed = "required" if field in schema.get("required", ()) else ""
            yield f"<tr><td><code>{escape(field)}</code></td><td>{_kind(value)}</td><td>{needed}</td></tr>"
        yield "</table>"


def _kind(schema: Mapping[str, Any]) -> str:
    """Return a type as HTML, with its bounds."""
    if "$ref" in schema:
        name = escape(schema["$ref"].rpartition("/")[2])
        return f"<a href='#{name}'>{name}</a>"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"] if each.get("type") != "null")
    if "enum" in schema or "const" in schema:
        return " or ".join(f"<code>{escape(str(each))}</code>" for each in schema.get("enum", [schema.get("const")]))
    kind = escape(str(schema.get("type", "any")))
    if "items" in schema:
        kind = f"array of {_kind(schema['items'])}"
    names = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    bounds = ", ".join(f"{sign} {schema[name]:g}" for name, sign in names.items() if name in schema)
    return f"{kind} ({escape(bounds)})" if bounds else kind
