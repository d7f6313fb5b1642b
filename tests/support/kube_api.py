"""A stand-in for the Kubernetes API server: real HTTP, lists in pages, watches with history and bookmarks.

It does what clients must live with: 401, 403, 410 Gone on lists and in watches, 429 with Retry-After, 5xx,
connections cut in the middle of a line, events that come twice or out of order, restarts, tokens that change.
"""

from __future__ import annotations

import asyncio
import copy
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

from aiohttp import web

from tests.support.kube_objects import Json

PODS, SLICES, POOLS = "pods", "endpointslices", "inferencepools"
_KINDS = {
    PODS: ("PodList", "v1"),
    SLICES: ("EndpointSliceList", "discovery.k8s.io/v1"),
    POOLS: ("InferencePoolList", "inference.networking.k8s.io/v1"),
}


class Event(NamedTuple):
    version: int
    type: str
    resource: str
    object: Json


class Fault(NamedTuple):
    """An answer other than what was asked for. Status 0 cuts the connection before any answer."""

    status: int
    headers: dict[str, str]
    watch_only: bool


class FakeKube:
    """See the module. ``version`` is the cluster's resourceVersion."""

    def __init__(self) -> None:
        self.version = 1000
        self.tokens: set[str] | None = None
        self.faults: list[Fault] = []
        self.lists = 0
        self.watches = 0
        self.seen_tokens: list[str] = []
        self.page = 500
        self.cut_lines = 0
        """This many of the next events are cut in the middle, and their connection with them."""
        self.repeat = 1
        """How often each event is sent."""
        self.bookmark_at_end = True
        self.dumb = 0
        """This many of the next watches say nothing and never end, as a connection through a dead node."""
        self.brief = 0
        """This many of the next watches end immediately."""
        self.ascii = True
        """Whether other characters are escaped; API servers do not."""
        self.selectors: set[str] = set()
        self.begun_s: list[float] = []
        """When each watch began."""
        self.patches: list[tuple[str, Json]] = []
        """Names of objects that were patched, and the patches."""
        self.refused_patches = 0
        """This many of the next patches answer 403."""
        self.port = 0
        self.expired_pages = 0
        """This many of the next continued pages answer 410."""
        self._objects: dict[str, dict[tuple[str, str], Json]] = {kind: {} for kind in _KINDS}
        self._history: list[Event] = []
        self._compacted = 0
        self._changed = asyncio.Condition()
        self._runner: web.ServerRunner | None = None
        self._open: list[web.BaseRequest] = []
        self._ending = asyncio.Event()
        self._tls: ssl.SSLContext | None = None

    # -- what happens in the cluster ------------------------------------------------------------------

    async def put(self, resource: str, one: Json) -> None:
        """Create or change an object."""
        one = copy.deepcopy(one)
        key = one["metadata"]["namespace"], one["metadata"]["name"]
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        sort = "MODIFIED" if key in self._objects[resource] else "ADDED"
        self._objects[resource][key] = one
        await self._add(Event(self.version, sort, resource, one))

    async def delete(self, resource: str, name: str, namespace: str = "serving") -> None:
        """Delete an object."""
        one = copy.deepcopy(self._objects[resource].pop((namespace, name)))
        self.version += 1
        one["metadata"]["resourceVersion"] = str(self.version)
        await self._add(Event(self.version, "DELETED", resource, one))

    def get(self, resource: str, name: str, namespace: str = "serving") -> Json:
        """An object as it is now."""
        return self._objects[resource][namespace, name]

    async def _add(self, event: Event) -> None:
        self._history.append(event)
        async with self._changed:
            self._changed.notify_all()

    async def compact(self) -> None:
        """Forget all history: watches from before this get 410."""
        self.version += 1
        self._compacted = self.version
        self._history.clear()
        async with self._changed:
            self._changed.notify_all()

    async def cut(self) -> None:
        """Cut every open watch."""
        for request in list(self._open):
            if request.transport is not None:
                request.transport.abort()

    def fail(self, status: int, times: int = 1, *, watch_only: bool = False, **headers: str) -> None:
        """Answer the next requests with this status."""
        self.faults += [Fault(status, headers, watch_only)] * times

    # -- serving --------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._ending = asyncio.Event()
        self._runner = web.ServerRunner(web.Server(self._handle), shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=tls)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        """The API server goes away; nothing listens on its port."""
        if self._runner is not None:
            self._ending.set()
            await self.cut()
            await self._runner.cleanup()
            self._runner = None

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        self.seen_tokens.append(token)
        self.selectors.add(request.query.get("labelSelector", ""))
        watching = request.query.get("watch") in {"1", "true"}
        if self.tokens is not None and token not in self.tokens:
            return _status(401, "Unauthorized", "Unauthorized")
        if self.faults and (watching or not self.faults[0].watch_only):
            fault = self.faults.pop(0)
            if not fault.status and request.transport is not None:
                request.transport.abort()
            return _status(fault.status or 500, "Injected", "injected by the test", fault.headers)
        if request.method == "PATCH":
            return await self._patch(request)
        resource = request.path.rpartition("/")[2]
        if resource not in self._objects or request.path.split("/")[1] not in {"api", "apis"}:
            return _status(404, "NotFound", "the server could not find the requested resource")
        if not watching:
            return self._list(request, resource)
        self.watches += 1
        self.begun_s.append(asyncio.get_running_loop().time())
        self._open.append(request)
        try:
            return await self._watch(request, resource)
        finally:
            self._open.remove(request)

    async def _patch(self, request: web.BaseRequest) -> web.Response:
        if self.refused_patches:
            self.refused_patches -= 1
            return _status(403, "Forbidden", 'cannot patch resource "pods"')
        *_, namespace, resource, name = request.path.split("/")
        one, patch = self._objects[resource].get((namespace, name)), await request.json()
        if one is None:
            return _status(404, "NotFound", f"{resource} {name!r} not found")
        self.patches.append((name, patch))
        if patch["metadata"].get("uid") not in {None, one["metadata"]["uid"]}:
            return _status(409, "Conflict", "Precondition failed: UID in precondition and UID in object meta")
        changed = copy.deepcopy(one)
        changed["metadata"]["annotations"] |= patch["metadata"]["annotations"]
        await self.put(resource, changed)
        return web.json_response(self._objects[resource][namespace, name])

    def _selected(self, request: web.BaseRequest, one: Json) -> bool:
        parts = request.path.split("/")
        if "namespaces" in parts and one["metadata"]["namespace"] != parts[parts.index("namespaces") + 1]:
            return False
        wanted = dict(
            part.split("=", 1) for part in request.query.get("labelSelector", "").split(",") if part
        )
        name = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
        if name and one["metadata"]["name"] != name:
            return False
        return all(one["metadata"]["labels"].get(key) == value for key, value in wanted.items())

    def _list(self, request: web.BaseRequest, resource: str) -> web.Response:
        self.lists += 1
        found = [one for _, one in sorted(self._objects[resource].items()) if self._selected(request, one)]
        limit = min(int(request.query.get("limit", "0")) or len(found) + 1, self.page)
        begin = 0
        version = self.version
        if "continue" in request.query:
            if self.expired_pages:
                self.expired_pages -= 1
                return _status(410, "Expired", "The provided continue parameter is too old")
            version, begin = map(int, request.query["continue"].split("@"))
        rest = begin + limit
        kind, group = _KINDS[resource]
        meta: Json = {"resourceVersion": str(version)}
        if rest < len(found):
            meta |= {"continue": f"{version}@{rest}", "remainingItemCount": len(found) - rest}
        body = {"kind": kind, "apiVersion": group, "metadata": meta, "items": found[begin:rest]}
        return web.json_response(body)

    async def _watch(self, request: web.BaseRequest, resource: str) -> web.StreamResponse:
        at = int(request.query["resourceVersion"])
        answer = web.StreamResponse(headers={"content-type": "application/json"})
        await answer.prepare(request)
        if self.brief:
            self.brief -= 1
            return answer
        if self.dumb:
            self.dumb -= 1
            await self._ending.wait()
            return answer
        end = asyncio.get_running_loop().time() + float(request.query.get("timeoutSeconds", "300"))
        try:
            async with asyncio.timeout_at(end):
                while not self._ending.is_set():
                    if at < self._compacted:
                        gone = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old"}
                        await answer.write(_line({"type": "ERROR", "object": gone}))
                        return answer
                    for event in [e for e in self._history if e.version > at and e.resource == resource]:
                        at = event.version
                        if self._selected(request, event.object):
                            await self._send(request, answer, event)
                    async with self._changed:
                        if not any(e.version > at and e.resource == resource for e in self._history):
                            await self._changed.wait()
        except TimeoutError:
            if self.bookmark_at_end:
                kind = _KINDS[resource][0].removesuffix("List")
                mark = {"kind": kind, "metadata": {"resourceVersion": str(self.version)}}
                await answer.write(_line({"type": "BOOKMARK", "object": mark}))
        return answer

    async def _send(self, request: web.BaseRequest, answer: web.StreamResponse, event: Event) -> None:
        shown = {"type": event.type, "object": event.object}
        line = json.dumps(shown, ensure_ascii=self.ascii).encode() + b"\n"
        if self.cut_lines:
            self.cut_lines -= 1
            await answer.write(line[: len(line) // 2])
            await asyncio.sleep(0.02)
            if request.transport is not None:
                request.transport.abort()
            raise ConnectionResetError
        for _ in range(self.repeat):
            await answer.write(line)


def _line(event: Json) -> bytes:
    return json.dumps(event).encode() + b"\n"


def _status(code: int, reason: str, message: str, headers: dict[str, str] | None = None) -> web.Response:
    body = {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }
    named = {key.replace("_", "-"): value for key, value in (headers or {}).items()}
    return web.json_response(body, status=code, headers=named)


@asynccontextmanager
async def kube_api(tls: ssl.SSLContext | None = None) -> AsyncIterator[FakeKube]:
    """A stand-in on a free port."""
    kube = FakeKube()
    await kube.start(tls)
    try:
        yield kube
    finally:
        await kube.stop()
