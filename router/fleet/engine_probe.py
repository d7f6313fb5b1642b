"""The probe: two short prompts per API, to see whether an engine does what predictions rest on.

The first prompt is new, the second begins with it. Shown by them: the answers report cached tokens; events of
the first prompt arrive and are those of its blocks; the hits of both are as predicted. ``kvatlas doctor`` and
the router (``placement/probing.py``) send the same requests and judge them by the same rules. Salts are tried
by ``salt_proof.py``, with the same client.

What an engine contradicts is tried a second time before it counts: blocks may have been evicted between the
two requests. Bounds: requests of at most ``TOKENS_MAX`` words and one generated token, two for each API, four
where the first try is contradicted, eight where nothing is reused; ``PROBE_S_MAX`` seconds in all.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol

import msgspec

from kvatlas.router.fleet.engine_client import (
    BODIES,
    NO_DOUBT,
    TOKENS_MAX,
    CacheReport,
    EngineClient,
    Shown,
    Verdict,
    text_of,
)
from kvatlas.router.openai.apis import CHAT, COMPLETION, MESSAGES, RESPONSES

PROBED: Final = (COMPLETION, CHAT, MESSAGES, RESPONSES)
"""APIs that clients send prompts to."""
PROBE_S_MAX: Final = 30.0
UNSHOWN_SHARE: Final = 0.9
"""Share of predicted tokens that counts where nothing has shown that they come."""
# Words used before the blocks are known: four of the largest common ones (128 tokens) and a margin.
_FIRST_WORDS: Final = 600
# At least, to take several times as long to compute as what the second prompt adds.
_WORDS_MIN: Final = 300
_BLOCKS: Final = 3
_TRIES_MAX: Final = 4
_DRAWS: Final = 16
MARGIN_WORDS: Final = 16
_POLL_S: Final = 0.02


class Prediction(msgspec.Struct, frozen=True):
    """Prompt tokens, and those of them that a prompt would take from the cache; None: unknown."""

    hit: int | None = None
    prompt_tokens: int | None = None
    mode: str = ""
    why_unknown: str = ""


class ProbedEngine(Protocol):
    """The engine as its prober sees it."""

    async def predict(self, path: str, body: bytes) -> Prediction:
        """Predict the hit of a request."""

    def events(self) -> int | None:
        """Events received of the engine so far; None: another process receives them."""

    def alignment(self) -> int | None:
        """Unit in tokens of which hits are multiples; None before it is known."""

    async def settle(self) -> None:
        """Use what the events have shown so far."""

    async def turn(self) -> bool:
        """Wait until the engine may be asked; False: it may not."""

    def took_s(self) -> float | None:
        """Seconds that its latest answer to a prompt took; None: not known, or it had other requests."""


class ProbeRequest(msgspec.Struct, frozen=True):
    """One request of the probe; counts in tokens. None: unknown, or not reported."""

    failed: Shown | None = None
    """Why there is no answer."""
    predicted: Prediction = Prediction()
    report: CacheReport = CacheReport()
    events_came: bool = False
    """Whether events arrived after the answer within the time limit."""

    @property
    def lengths_differ(self) -> bool:
        """Whether the engine counts a different number of tokens."""
        ours, theirs = self.predicted.prompt_tokens, self.report.prompt_tokens
        return None not in {ours, theirs} and ours != theirs


class ApiProbe(msgspec.Struct, frozen=True):
    """Outcome of one API; ``share``: of the predicted tokens, those that came."""

    reports: Shown
    hits: Shown
    share: float = 1.0


class EngineProbe(msgspec.Struct):
    """Outcome of the probe of one engine."""

    model: str
    apis: dict[str, ApiProbe] = {}
    events: Shown = Shown("later", "are not tried yet")
    pull_source: Shown | None = None
    """Whether other engines reach the address that they are to pull from; None where none pulls."""
    tries: int = 0
    timed: list[tuple[int, float]] = []
    """Tokens that the engine computed for a prompt, and seconds that it took with nothing else to do, in the
    order of the prompts."""

    def all_shown(self) -> dict[str, Shown]:
        """Return everything that was tried, by what it is."""
        found = {"events": self.events}
        for path, api in self.apis.items():
            found[f"cached_tokens of {path}"], found[f"hits of {path}"] = api.reports, api.hits
        return found if self.pull_source is None else {**found, "pull source": self.pull_source}

    def summary(self) -> dict[str, str]:
        """Return the verdict of everything that was tried, with the reason where it is no proof."""
        return {name: one.text for name, one in self.all_shown().items()}

    def doubts(self) -> dict[str, Shown]:
        """Return what was tried and is not proven."""
        return {name: one for name, one in self.all_shown().items() if one.verdict not in NO_DOUBT}

    @property
    def again(self) -> bool:
        """Whether something is to be tried again."""
        return bool(self.doubts())

    @property
    def hit_share(self) -> float:
        """Share of predicted tokens that count in decisions."""
        hits = [api for api in self.apis.values() if api.hits.verdict not in {"absent", "later"}]
        refuted = [api.share for api in hits if api.hits.verdict == "refuted"]
        if refuted:
            return min(refuted)
        return UNSHOWN_SHARE if hits and not any(api.hits.verdict == "proven" for api in hits) else 1.0


NOT_ANSWERED: Final = Shown("later", "could not be tried in time")
_NOTHING: Final = "are as predicted, but nothing was reused"
_NO_REPORT: Final = (
    "are not in its answers; start the engine with --enable-prompt-tokens-details (SGLang: "
    "--enable-cache-report)"
)


class EngineProber:
    """Sends the probe to one engine.

    Args:

      publishes: Whether it should publish events.

      tokens_max: Longest prompt that it accepts, in tokens.

      events_s_max: Longest wait for the events of a prompt, in seconds.

      quiet_s: Seconds without events after which all are assumed to have arrived.
    """

    def __init__(
        self,
        client: EngineClient,
        engine: ProbedEngine,
        model: str,
        *,
        publishes: bool,
        tokens_max: int | None,
        events_s_max: float,
        quiet_s: float = 0.1,
        apis: tuple[str, ...] = PROBED,
    ) -> None:
        self._client = client
        self._engine = engine
        self._model = model
        self._publishes = publishes
        self._words_max = max(8, min(TOKENS_MAX, (tokens_max or TOKENS_MAX) // 4))
        self._events_s_max = events_s_max
        self._quiet_s = quiet_s
        self._apis = apis
        self.requests: dict[str, list[ProbeRequest]] = {}
        """The latest ones by API."""
        self._timed: list[tuple[int, float]] = []

    async def probe(self, found: EngineProbe) -> None:
        """Fill in what is not decided yet. Ends early where the engine may not be asked any more."""
        known = {path: api for path, api in found.apis.items() if not _open(api)}
        if not self._publishes:
            found.events = Shown("absent", "are not published")
        try:
            async with asyncio.timeout(PROBE_S_MAX):
                for path in self._apis:
                    if path not in known:
                        found.apis[path] = ApiProbe(NOT_ANSWERED, NOT_ANSWERED)
                        await self._try(path, found)
        except TimeoutError:
            pass
        found.tries += 1
        found.timed = max(found.timed, self._timed, key=len)

    async def _try(self, path: str, found: EngineProbe) -> None:
        for tries in range(_TRIES_MAX):
            self.requests[path] = requests = await self._pair(path, _DRAWS if tries else 1)
            found.apis[path] = judge(requests, estimates=not self._publishes)
            shown = judge_events(requests) if self._publishes else None
            if shown is not None and found.events.verdict != "proven":
                found.events = shown
            hits = found.apis[path].hits
            # Windows and states are kept at the end of a prompt only, which may lie beyond what the two have
            # in common: a chat's prompt ends behind its text. The length of the next one is chosen.
            if hits.why != _NOTHING and (tries or hits.verdict != "refuted"):
                return

    async def _pair(self, path: str, draws: int) -> list[ProbeRequest]:
        words, known = self._words(), self._engine.alignment() is not None
        first = await self._text(path, words, draws)
        sent = await self._send(path, first, then=text_of(MARGIN_WORDS))
        if sent.failed is None and not known and self._words() > words:
            # The blocks turn out to be large.
            words = self._words()
            first = text_of(words)
            sent = await self._send(path, first, then=text_of(MARGIN_WORDS))
        if sent.failed is not None:
            return [sent]
        return [sent, await self._send(path, f"{first} {text_of(MARGIN_WORDS)}")]

    async def _text(self, path: str, words: int, draws: int) -> str:
        """Return new words; of several draws, those whose prompt ends farthest behind a whole block."""
        text, alignment, farthest = text_of(words), self._engine.alignment(), -1
        if draws == 1 or alignment is None:
            return text
        for _ in range(draws):
            drawn = text_of(words)
            tokens = (await self._engine.predict(path, self._body(path, drawn))).prompt_tokens
            if tokens is not None and tokens % alignment > farthest:
                text, farthest = drawn, tokens % alignment
        return text

    def _words(self) -> int:
        alignment = self._engine.alignment()
        wanted = _FIRST_WORDS if alignment is None else max(_WORDS_MIN, _BLOCKS * alignment + MARGIN_WORDS)
        return max(2, min(wanted, self._words_max))

    def _body(self, path: str, text: str) -> bytes:
        return msgspec.json.encode({"model": self._model, **BODIES[path](text)})

    async def _send(self, path: str, text: str, *, then: str = "") -> ProbeRequest:
        """Send one request; ``then``: how a next prompt goes on, for which its events are awaited."""
        body = self._body(path, text)
        if not await self._engine.turn():
            return ProbeRequest(NOT_ANSWERED)
        predicted, before = await self._engine.predict(path, body), self._engine.events()
        answer = await self._client.send(path, body)
        if isinstance(answer, Shown):
            return ProbeRequest(answer, predicted)
        # Of new words at most the beginning of the chat template is cached.
        took_s, cached = self._engine.took_s(), 0 if then and answer.cached is None else answer.cached
        if took_s is not None and cached is not None and answer.prompt_tokens is not None:
            self._timed.append((max(1, answer.prompt_tokens - cached), took_s))
        came = bool(then) and self._publishes
        if came:
            came = await self._events_of(path, self._body(path, f"{text} {then}"), before)
        await self._engine.settle()
        return ProbeRequest(None, predicted, answer, came)

    async def _events_of(self, path: str, next_body: bytes, before: int | None) -> bool:
        """Wait until the events of a prompt are known: those that came are followed by silence, or, where
        another process receives them, the hit of the next prompt has risen."""
        now = asyncio.get_running_loop().time
        deadline, last, quiet_since = now() + self._events_s_max, before, now()
        while now() < deadline:
            await asyncio.sleep(_POLL_S)
            count = self._engine.events()
            if count is None:
                if (await self._engine.predict(path, next_body)).hit:
                    return True
            elif count != last:
                last, quiet_since = count, now()
            elif count != before and now() >= quiet_since + self._quiet_s:
                break
        return last != before


def _open(api: ApiProbe) -> bool:
    """Whether something of it is to be tried again."""
    return not {api.reports.verdict, api.hits.verdict} <= NO_DOUBT


def judge_events(requests: list[ProbeRequest]) -> Shown | None:
    """Whether events came and were those of the prompt; None: nothing was computed."""
    if requests[-1].failed is not None:
        return None
    first, second = requests
    if second.predicted.hit:
        return Shown("proven")
    if not first.events_came:
        return Shown("refuted", "did not come after it had computed a prompt")
    if second.predicted.hit is None:
        return Shown("refuted", f"came, and nothing follows from them: {second.predicted.why_unknown}")
    if second.report.cached:
        return Shown("refuted", "came, and are not those of the blocks that it reports as cached")
    return Shown("unshown", "came; but nothing of its prompt was kept")


def judge(requests: list[ProbeRequest], *, estimates: bool = False) -> ApiProbe:
    """Judge the requests of one API. ``estimates``: its hits are estimated, without its events."""
    if (failed := requests[-1].failed) is not None:
        return ApiProbe(failed, failed)
    told = [one.report.reported for one in requests]
    reports = Shown("unshown", _NO_REPORT) if told == [None, None] else Shown("proven")
    if estimates:
        return ApiProbe(reports, Shown("absent", "are estimated, since no events are published"))
    for one in requests:
        if one.lengths_differ:
            why = f"{one.predicted.prompt_tokens} tokens here, {one.report.prompt_tokens} at the engine"
            return ApiProbe(reports, Shown("refuted", f"are not known: the prompt has {why}"), 0.0)
    return ApiProbe(reports, *_judge_hits(*requests))


def _judge_hits(first: ProbeRequest, second: ProbeRequest) -> tuple[Shown, float]:
    """Compare the hits with those predicted; also the share of them that came."""
    if second.predicted.hit is None:
        # Some APIs of some engines are never read: SGLang renders no messages.
        unread = second.predicted.prompt_tokens is None
        why = f"are not predicted: {second.predicted.why_unknown}"
        return Shown("absent" if unread else "unshown", why), 1.0
    if second.report.cached is None:
        verdict: Verdict = "later" if second.report.noisy else "unshown"
        return Shown(verdict, "cannot be checked: no answer reports cached tokens"), 1.0
    # Where hits are reported, one of 0 may be left out, as by vLLM.
    none, worst, share = 0 if second.report.reported else None, None, 1.0
    for one in (first, second):
        hit, length = one.predicted.hit, one.report.prompt_tokens
        came = none if one.report.cached is None else one.report.cached
        if came is not None and length is not None and came > length:
            return Shown("refuted", f"are wrong: {came} cached tokens reported of {length}"), 0.0
        if None not in (hit, came) and came != hit:
            worst = Shown("refuted", f"are wrong: {hit} tokens predicted, {came} came")
            share = min(share, (came or 0) / hit) if hit else share
    if worst is not None:
        return worst, share
    if not second.report.cached:
        return Shown("unshown", _NOTHING), 1.0
    return Shown("proven"), 1.0
