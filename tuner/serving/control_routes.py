"""The control API under `/tuner/v1`: its routes, which FastAPI describes by OpenAPI.

Everything needs a key except `/healthz` (or `/health`), and `/metrics` from this machine.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Coroutine
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Header, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from tuner.errors import problem_text
from tuner.gateway.request_error import RequestError, dotted
from tuner.gateway.requests import json_object
from tuner.serving.asking import (
    ApplicationKey,
    CallList,
    OpenedSession,
    Page,
    ServedModels,
    SessionInfo,
)
from tuner.serving.control import (
    ApplicationInfo,
    Applications,
    Control,
    GiveReward,
    NewApplication,
    OpenSession,
    call_info,
    new_application_key,
    session_info,
)
from tuner.serving.routing import ApiCaller, not_allowed
from tuner.serving.serving_store import ServingStore, digest
from tuner.traces.store import trace_line, trace_to_json


class ErrorBody(BaseModel):
    """The problem with a request, and what to do; a code for programs; the field."""

    message: str
    code: str | None = None
    param: str | None = None


class ErrorResponse(BaseModel):
    """The body of an answer with an error status."""

    error: ErrorBody


_REFUSALS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorResponse, "description": what}
    for status, what in {
        400: "The body is not JSON, or nested too deeply.",
        401: "The key is missing, unknown, or that of another session.",
        403: "The key may not do this.",
        404: "There is no such session, call or application.",
        409: "It conflicts with the current state.",
        413: "The body is too large.",
        422: "The request is invalid.",
        429: "The key is above its rate limit; `Retry-After` says when to retry.",
    }.items()
}


class _JsonRoute(APIRoute):
    """Reads bodies as the gateway does: FastAPI has no bounds of depth and of numbers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def read_first(request: Request) -> Response:
            if body := await request.body():
                json_object(body)
            return await handle(request)

        return read_first


router = APIRouter(prefix="/tuner/v1", responses=_REFUSALS, route_class=_JsonRoute)
beside = APIRouter()
_bearer = HTTPBearer(auto_error=False, description="The admin's key, an application's, a session's")


async def _control(request: Request) -> Control:
    control: Control = request.app.state.control
    return control


Of = Annotated[Control, Depends(_control)]


async def _known(
    request: Request,
    control: Of,
    _: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> ApiCaller:
    return control.caller(request.headers)


Known = Annotated[ApiCaller, Depends(_known)]


async def _administrator(caller: Known) -> ApiCaller:
    if caller.kind != "admin":
        raise not_allowed("the admin key")
    return caller


Administrator = Annotated[ApiCaller, Depends(_administrator)]
Id = Annotated[str, Path(max_length=64)]
Name = Annotated[str, Path(max_length=64)]


@router.post("/sessions", status_code=201)
async def open_session(
    given: OpenSession,
    control: Of,
    caller: Known,
    request: Request,
    idempotency_key: Annotated[str | None, Header(max_length=256)] = None,
) -> OpenedSession:
    """Open a session: its key is the API key of one run of an agent, and is returned only here."""
    id_, key = control.open(caller, given, idempotency_key)
    control.log("open", caller, id_)
    return OpenedSession(id=id_, key=key, base_url=_base_url(request))


@router.get("/sessions")
async def list_sessions(
    control: Of,
    caller: Known,
    state: Literal["open", "ended"] | None = None,
    judged: bool | None = None,
    group: str | None = None,
    application: str | None = None,
    tag: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    after: Annotated[str, Query(pattern=r"^(s-[0-9a-f]{24})?$")] = "",
) -> Page:
    """Sessions in the order in which they were opened; an application sees its own."""
    if caller.session is not None:
        raise not_allowed("the key of an application, or the admin key")
    if caller.application is not None and application not in (None, caller.application):
        raise not_allowed("the admin key, for the sessions of another application")

    def read(store: ServingStore) -> list[SessionInfo]:
        found = store.sessions(
            ended=None if state is None else state == "ended",
            judged=judged,
            group=group,
            application=caller.application or application,
            tag=tag,
            after=after,
            limit=limit + 1,
        )
        return [session_info(store, session) for session in found]

    found = await control.read(read)
    more = found[limit - 1].id if len(found) > limit else None
    return Page(sessions=found[:limit], next=more)


@router.get("/sessions/{id}")
async def get_session(id: Id, control: Of, caller: Known) -> SessionInfo:
    """A session's current state."""
    return session_info(control.store, control.session(caller, id))


@router.get("/sessions/{id}/calls")
async def get_calls(id: Id, control: Of, caller: Known) -> CallList:
    """The calls of a session in the order in which they were recorded."""
    control.session(caller, id)
    found = await control.read(lambda store: store.calls(id))
    return CallList(calls=[call_info(stored) for stored in found])


@router.post("/sessions/{id}/reward")
async def give_reward(id: Id, given: GiveReward, control: Of, caller: Known) -> SessionInfo:
    """Give a reward, feedback or both to a session or one of its calls; the latest counts."""
    control.session(caller, id)
    try:
        control.store.reward(id, given.reward, given.feedback, given.call)
    except LookupError:
        raise RequestError(
            f"session {id} has no call {given.call!r}: its id consists of the response's id and "
            "the choice's index, as in the list of calls",
            status=404,
            code="no_such_call",
        ) from None
    control.metrics.rewards.labels("session" if given.call is None else "call").inc()
    control.log("reward", caller, id, call=given.call, reward=given.reward)
    return session_info(control.store, control.store.session(id))


@router.post("/sessions/{id}/end")
async def end_session(id: Id, control: Of, caller: Known) -> SessionInfo:
    """Seal a session: it accepts no more calls, but still accepts rewards. Repeating it changes
    nothing."""
    control.session(caller, id)
    control.live.end(id)
    control.log("end", caller, id)
    return session_info(control.store, control.store.session(id))


@router.get("/sessions/{id}/export", response_model=dict[str, Any])
async def export_session(id: Id, control: Of, caller: Known) -> Response:
    """A session as a trace, in the format of a run's traces."""
    control.session(caller, id, own=False)
    line = await control.read(lambda store: trace_line(trace_to_json(store.trace(id))))
    return Response(line, media_type="application/json")


@router.delete("/sessions/{id}", status_code=204, response_model=None)
async def delete_session(id: Id, control: Of, caller: Known) -> None:
    """Delete a session with its calls, rewards and replies."""
    control.session(caller, id, own=False)
    control.live.delete(id)
    control.log("delete", caller, id)


@router.post("/applications", status_code=201)
async def add_application(given: NewApplication, control: Of, _: Administrator) -> ApplicationKey:
    """Create a key for an application; it is returned only here."""
    key = new_application_key()
    if not control.store.add_application(given.name, digest(key)):
        raise RequestError(
            f"application {given.name!r} already exists: choose another name, or delete it first",
            status=409,
            code="application_exists",
        )
    return ApplicationKey(name=given.name, key=key)


@router.get("/applications")
async def list_applications(control: Of, _: Administrator) -> Applications:
    """The applications that have keys."""
    found = [ApplicationInfo(name=name, made=made) for name, made in control.store.applications()]
    return Applications(applications=found)


@router.delete("/applications/{name}", status_code=204, response_model=None)
async def delete_application(name: Name, control: Of, _: Administrator) -> None:
    """Invalidate an application's key; its sessions stay."""
    if not control.store.delete_application(name):
        raise RequestError(
            f"there is no application {name!r}", status=404, code="no_such_application"
        )


@router.get("/models")
async def get_models(control: Of, _: Administrator) -> ServedModels:
    """The serving weights, the candidate, and earlier decisions."""
    return control.models.models()


@router.post("/rollback")
async def roll_back(control: Of, _: Administrator) -> ServedModels:
    """Serve the weights before the last promotion again."""
    return await control.models.rollback()


@router.get("/openapi.json", include_in_schema=False)
async def openapi(request: Request, _: Known) -> dict[str, Any]:
    """This API's OpenAPI description."""
    described: dict[str, Any] = request.app.openapi()
    return described


@beside.get("/healthz")
@beside.get("/health", include_in_schema=False)
async def health(control: Of, response: Response) -> dict[str, str]:
    """Whether the server works: 503 if its engine has failed and it must be restarted."""
    if control.failure() is None:
        return {"status": "ok"}
    response.status_code = 503
    return {"status": "the engine failed"}


@beside.get("/metrics", include_in_schema=False)
async def metrics(request: Request, control: Of) -> Response:
    """Metrics for Prometheus."""
    if not _is_this_machine(request) and control.caller(request.headers).kind != "admin":
        raise not_allowed("the admin key")
    content, media_type = await control.read(control.metrics.text)
    return Response(content, media_type=media_type)


def _is_this_machine(request: Request) -> bool:
    """Whether a request comes from this machine, and not through a proxy on it."""
    forwarded = any(name in request.headers for name in ("forwarded", "x-forwarded-for", "via"))
    if request.client is None or forwarded:
        return False
    return ipaddress.ip_address(request.client.host).is_loopback


def _base_url(request: Request) -> str:
    """The gateway's URL for the caller, by the host name that it used."""
    scheme = "https" if request.headers.get("x-forwarded-proto") == "https" else "http"
    return f"{scheme}://{request.headers.get('host', 'localhost')}/v1"


def control_app(control: Control) -> FastAPI:
    """The control API as an ASGI application."""
    app = FastAPI(
        title="tuner serve",
        version="1",
        description="Sessions, rewards and models of a server that is learned from.",
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
    )
    app.state.control = control
    app.include_router(router)
    app.include_router(beside)
    app.add_exception_handler(RequestError, _refused)
    app.add_exception_handler(RequestValidationError, _not_read)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _failed)
    return app


async def _refused(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return Response(error.body(), error.status, dict(error.headers), media_type="application/json")


async def _not_read(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = tuple(first["loc"][1:])
    said = f"{dotted(where)}: {problem_text(first)}" if where else problem_text(first)
    told = RequestError(said, status=422, path=where or None, code="invalid_request")
    return await _refused(request, told)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    said = f"{request.method} {request.url.path}: {error.detail}; see /tuner/v1/openapi.json"
    return await _refused(request, RequestError(said, status=error.status_code))


async def _failed(request: Request, error: Exception) -> Response:
    told = RequestError(f"the server failed: {type(error).__name__}", status=500)
    return await _refused(request, told)
