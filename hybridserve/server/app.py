"""The application: routes, their place in the OpenAPI document, and the gate before them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import FastAPI
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException
from starlette.responses import Response

from hybridserve.server import protocol, routes, wire
from hybridserve.server.errors import ErrorBody, of_status
from hybridserve.server.exchange import endpoint_route
from hybridserve.server.gate import Gate
from hybridserve.server.playground.files import FILES, sender
from hybridserve.server.playground.state import PlaygroundState, playground_state
from hybridserve.server.security import MODEL, ROUTES, Access, Policy
from hybridserve.version import __version__

if TYPE_CHECKING:
    from pydantic import BaseModel
    from starlette.requests import Request

    from hybridserve.server.exchange import Endpoint
    from hybridserve.server.service import Service

REFERENCE = "#/components/schemas/{name}"
_NO_TELEMETRY: Any = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
"""FastAPI's own would tell of more than `tracing` does: exceptions' messages, for one."""
_ALWAYS = (400, 401, 403, 408, 413, 415, 431, 500, 503)


@dataclass(frozen=True, slots=True)
class _Route:
    path: str
    endpoint: Endpoint
    body: type[BaseModel] | None = None
    answer: type[msgspec.Struct] | None = None
    piece: type[msgspec.Struct] | None = None
    """An event of the stream."""
    errors: tuple[int, ...] = ()
    has_head: bool = False
    """HEAD is answered as GET is; the ASGI server leaves the body out."""

    @property
    def public_path(self) -> str:
        """As the OpenAPI document has it."""
        return self.path.replace(":path}", "}")


_ROUTES = (
    _Route(
        "/v1/completions",
        routes.create_completion,
        protocol.CompletionRequest,
        wire.Completion,
        wire.Completion,
        (404, 429, 504),
    ),
    _Route(
        "/v1/chat/completions",
        routes.create_chat_completion,
        protocol.ChatRequest,
        wire.ChatCompletion,
        wire.ChatChunk,
        (404, 429, 504),
    ),
    _Route("/v1/models", routes.list_models, answer=wire.ModelList, has_head=True),
    _Route(MODEL, routes.retrieve_model, answer=wire.ModelCard, errors=(404,)),
    _Route(
        "/v1/load_lora_adapter", routes.load_lora_adapter, protocol.LoadAdapterRequest, wire.LoadedAdapter
    ),
    _Route(
        "/v1/unload_lora_adapter",
        routes.unload_lora_adapter,
        protocol.UnloadAdapterRequest,
        wire.UnloadedAdapter,
        errors=(404,),
    ),
    _Route("/tokenize", routes.tokenize, protocol.TokenizeRequest, wire.Tokens),
    _Route("/detokenize", routes.detokenize, protocol.DetokenizeRequest, wire.Text),
    _Route("/tokenizer_info", routes.tokenizer_info, answer=wire.TokenizerInfo),
    _Route("/health", routes.health, answer=wire.Health, has_head=True),
    _Route("/health/ready", routes.health, answer=wire.Health, has_head=True),
    _Route("/health/live", routes.health_live, answer=wire.Health, has_head=True),
    _Route("/version", routes.version, answer=wire.Version),
    _Route("/metrics", routes.metrics),
    _Route("/playground/state", playground_state, answer=PlaygroundState),
)
_HEADS = frozenset(route.path for route in _ROUTES if route.has_head)


def create_app(service: Service) -> Gate:
    """The ASGI application of a server."""
    app = FastAPI(
        title="hybridserve",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        openapi_url="/openapi.json",
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    for route in _ROUTES:
        endpoint = endpoint_route(service, route.endpoint)
        if route.has_head:
            app.add_api_route(
                route.path, endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False
            )
        app.add_api_route(
            route.path,
            endpoint,
            methods=["GET" if route.body is None else "POST"],
            operation_id=re.sub(r"\W+", "_", route.public_path).strip("_"),
            response_model=None,
            response_class=Response,
            responses=_responses(route),
            openapi_extra=_extra(route),
        )
    for path, name in FILES.items():
        route_of_file = endpoint_route(service, sender(name))
        app.add_api_route(path, route_of_file, response_class=Response, include_in_schema=False)
    app.add_exception_handler(HTTPException, _refused)
    _describe(app)
    served = {getattr(route, "path", "") for route in app.routes}
    if served != ROUTES.keys():
        raise RuntimeError(f"security.ROUTES and what is served differ: {sorted(served ^ ROUTES.keys())}")
    return Gate(app, Policy(service.config), service.metrics, service.spans)


async def _refused(request: Request, error: Exception) -> Response:
    """Of the router: no such path or method."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    if status == 405 and request.scope["path"] in _HEADS:  # two routes, of which the router names one
        headers["Allow"] = "GET, HEAD"
    return Response(of_status(status).body, status, headers, "application/json")


# ---- the OpenAPI document


def _reference(kind: type[BaseModel] | type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": REFERENCE.format(name=kind.__name__)}}


def _event(piece: type[msgspec.Struct]) -> dict[str, Any]:
    """Of a stream: each holds JSON, but for the last, which is [DONE]. Before OpenAPI 3.2, a schema of
    server-sent events is understood as that of one."""
    kinds: list[type[msgspec.Struct]] = [piece, ErrorBody]
    data = [
        {"contentMediaType": "application/json", "contentSchema": _reference(kind)["schema"]}
        for kind in kinds
    ]
    return {
        "type": "object",
        "properties": {"data": {"type": "string", "anyOf": [*data, {"const": "[DONE]"}]}},
        "required": ["data"],
    }


def _responses(route: _Route) -> dict[int | str, dict[str, Any]]:
    content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    if route.answer is not None:
        content = {"application/json": _reference(route.answer)}
    if route.piece is not None:
        content["text/event-stream"] = {"schema": _event(route.piece)}
    responses: dict[int | str, dict[str, Any]] = {200: {"description": "Done", "content": content}}
    problem = {"application/json": _reference(ErrorBody)}
    for status in sorted({*_ALWAYS, *route.errors}):
        responses[status] = {"description": str(of_status(status)).capitalize(), "content": problem}
    if route.answer is wire.Health:
        responses[503] = {
            "description": "Not served",
            "content": {"application/json": _reference(wire.Health)},
        }
    return responses


def _extra(route: _Route) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if route.body is not None:
        content = {"application/json": _reference(route.body)}
        extra["requestBody"] = {"required": True, "content": content}
    if route.path == MODEL:
        extra["parameters"] = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    if ROUTES[route.path] is not Access.PUBLIC:
        extra["security"] = [{"key": []}, {}]
    return extra


def _describe(app: FastAPI) -> None:
    """Adds the shapes of bodies and answers to the document that FastAPI writes."""
    write = app.openapi

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            schema = write()
            components = schema.setdefault("components", {})
            components["schemas"] = _schemas()
            components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            app.openapi_schema = schema
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]


def _schemas() -> dict[str, Any]:
    bodies = [route.body for route in _ROUTES if route.body is not None]
    _, described = models_json_schema(
        [(body, "validation") for body in bodies], ref_template=REFERENCE.replace("{name}", "{model}")
    )
    answers = {kind for route in _ROUTES for kind in (route.answer, route.piece) if kind is not None}
    _, shapes = msgspec.json.schema_components([*answers, ErrorBody], ref_template=REFERENCE)
    for body in bodies:
        _allow_null(described["$defs"][body.__name__])
    return {**shapes, **described["$defs"]}


def _allow_null(schema: dict[str, Any]) -> None:
    """Of a body: null means that a field was not given."""
    for name, field in schema["properties"].items():
        if name in schema.get("required", ()) or {"type": "null"} in field.get("anyOf", ()):
            continue
        about = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
        schema["properties"][name] = {"anyOf": [field, {"type": "null"}], **about}
