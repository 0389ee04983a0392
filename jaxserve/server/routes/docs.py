"""`/`, which says what this server is, and `/docs`: its routes and their fields, as a page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from jaxserve.core.version import __version__
from jaxserve.protocol.response_models import About
from jaxserve.server.openapi import ERRORS, documented_responses
from jaxserve.server.responses import JsonResponse

router = APIRouter()

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
  color: #222; background: #fff }
h2 { margin-top: 2.5rem; font-size: 1.1rem } h2 b { color: #0a6 }
table { border-collapse: collapse; width: 100% }
td { border-top: 1px solid #ddd; padding: .3rem .6rem .3rem 0; vertical-align: top }
code, h2 { font-family: ui-monospace, monospace; overflow-wrap: anywhere }
"""


@router.head("/", include_in_schema=False)
@router.get("/", responses=documented_responses(About) | ERRORS)
async def about(request: Request) -> JsonResponse:
    """What this server is."""
    service = request.app.state.service
    root = request.scope.get("root_path", "")
    return JsonResponse(
        {
            "name": "jaxserve",
            "version": __version__,
            "status": service.state,
            "models": list(service.model_names),
            "docs": f"{root}/docs",
            "openapi": f"{root}/openapi.json",
        }
    )


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> HTMLResponse:
    """The OpenAPI document as a page, without scripts."""
    page = "".join(_page(request.app.openapi(), request.scope.get("root_path", "")))
    return HTMLResponse(page, headers={"content-security-policy": _POLICY})


def _page(document: Mapping[str, Any], root: str) -> Iterator[str]:
    schemas = document.get("components", {}).get("schemas", {})
    title = f"jaxserve {__version__}"
    yield (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body><h1>{title}</h1>"
        "<p>An inference server with the APIs of OpenAI and Anthropic. "
        f'<a href="{html.escape(root)}/openapi.json">openapi.json</a> has every type.</p>'
    )
    for path, methods in document["paths"].items():
        for method, route in methods.items():
            yield f"<h2><b>{method.upper()}</b> {html.escape(path)}</h2>"
            yield f"<p>{html.escape(route.get('description', ''))}</p>"
            body = route.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                yield from _fields(schemas[_name(body["schema"])])
    yield "</body></html>"


def _fields(schema: Mapping[str, Any]) -> Iterator[str]:
    required = schema.get("required", ())
    yield "<table>"
    for name, field in schema["properties"].items():
        kind = html.escape(_type(field)) + (", required" if name in required else "")
        text = html.escape(field.get("description", ""))
        yield f"<tr><td><code>{html.escape(name)}</code><td><code>{kind}</code><td>{text}</tr>"
    yield "</table>"


def _type(schema: Mapping[str, Any]) -> str:
    """A JSON schema in a few words, without null."""
    if "$ref" in schema:
        return _name(schema)
    if "enum" in schema or "const" in schema:
        return " | ".join(map(repr, schema.get("enum", [schema.get("const")])))
    if "anyOf" in schema:
        kinds = [_type(each) for each in schema["anyOf"] if each.get("type") != "null"]
        return " | ".join(dict.fromkeys(kinds))
    if schema.get("type") == "array":
        return f"[{_type(schema.get('items', {}))}]"
    return schema.get("type", "any")


def _name(reference: Mapping[str, Any]) -> str:
    return reference["$ref"].rpartition("/")[2]
