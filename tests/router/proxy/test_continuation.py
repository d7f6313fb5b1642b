"""A stream that is cut anywhere and goes on elsewhere reads like one that was not cut."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kvatlas.router.openai.apis import CHAT, COMPLETION
from kvatlas.router.openai.members import at_once
from kvatlas.router.proxy import continuation
from kvatlas.router.proxy.continuation import (
    ContinuedStream,
    completion_of,
    held_back,
    text_so_far,
    whole_tokens,
)
from kvatlas.router.proxy.continuation_plan import ContinuationPlan, plan_of
from kvatlas.router.proxy.kept_stream import KeptStream
from tests.support.examples import examples
from tests.support.text_engine import DONE, PROMPT, TextEngine, decode, token


def request(path: str, body: dict[str, Any]) -> tuple[dict[str, Any], ContinuationPlan]:
    own = {"messages": [{"role": "user", "content": "hi"}]} if path == CHAT else {"prompt": "hi"}
    whole = {"model": "m", "stream": True, **own, **body}
    plan = plan_of(path, json.dumps(whole).encode())
    assert isinstance(plan, ContinuationPlan), plan
    return whole, plan


def broken(
    engine: TextEngine, path: str, body: dict[str, Any], events: int, cuts: Sequence[int] = ()
) -> tuple[bytes, KeptStream]:
    """The client's part of a stream that broke behind this number of events, which came in these pieces."""
    whole, plan = request(path, body)
    kept = KeptStream(plan)
    came = b"".join(itertools.islice(engine.events(path, {**whole, "return_token_ids": True}), events))
    out, start = b"", 0
    for cut in sorted(cut % (len(came) + 1) for cut in cuts):
        out += kept.feed(came[start:cut]) if cut > start else b""
        start = max(start, cut)
    return out + (kept.feed(came[start:]) if came[start:] else b""), kept


def goes_on(engine: TextEngine, kept: KeptStream, cuts: Sequence[int] = ()) -> bytes:
    """The rest, as the client has it; it is cut again behind each of these numbers of events."""
    if kept.complete:
        return kept.closing()
    assert not kept.check()
    tokens = whole_tokens(kept.ids, decode)
    assert tokens is not None
    assert not held_back(kept, tokens, decode)
    stopping = at_once(text_so_far(kept, tokens, decode)) if kept.plan.stop.stops else None
    assert (stopping is not None) == bool(kept.plan.stop.stops)
    again = ContinuedStream(kept, tokens, stopping)
    body = completion_of(kept, tokens, 100_000)
    if body is None:
        return again.over()
    assert isinstance(body, bytes), body
    out = b""
    for number, event in enumerate(engine.events(COMPLETION, json.loads(body), "another")):
        if cuts and number == cuts[0]:
            return out + goes_on(engine, kept, cuts[1:])
        again.taken()
        out += again.feed(event)
        if again.done:
            break
    assert kept.complete
    assert not kept.closing()
    return out


def shown(stream: bytes) -> list[Any]:
    """Events without what may differ."""
    found = []
    for block in stream.split(b"\n\n")[:-1]:
        if block == DONE.strip():
            found.append("done")
            continue
        event = json.loads(block.removeprefix(b"data: "))
        found.append(event)
    return found


def joined(stream: bytes) -> dict[str, Any]:
    """The sum of the events, however the tokens are shared out among them."""
    text, logprobs, ended = "", [], []
    usage = None
    events = shown(stream)
    assert events[-1] == "done"
    assert events.count("done") == 1
    for event in events[:-1]:
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
            if choice["logprobs"]:
                told = choice["logprobs"]
                logprobs += told["content"] if "content" in told else zip(*told.values(), strict=True)
            if choice["finish_reason"]:
                ended.append((choice["finish_reason"], choice["stop_reason"]))
    return {
        "text": text,
        "logprobs": [list(one) if isinstance(one, tuple) else one for one in logprobs],
        "ended": ended,
        "usage": usage,
    }


texts = st.text(
    st.one_of(st.sampled_from('ab \n"\\🙂語é€\x01\x7f'), st.characters(exclude_categories=("Cs",))),
    min_size=1,
    max_size=40,
)


@st.composite
def answers(draw: st.DrawFn) -> list[int]:
    """Tokens of a text, cut anywhere, within characters too."""
    text = draw(texts)
    assume("\ufffd" not in text)
    data, ids, start = text.encode(), [], 0
    while start < len(data):
        size = draw(st.integers(1, 3))
        ids.append(token(data[start : start + size]))
        start += size
    return ids


bodies = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 60),
        "min_tokens": st.integers(0, 8),
        "stop": st.one_of(
            st.sampled_from(["a", "ab", " a"]),
            st.lists(st.sampled_from(["b", "ab ", "🙂", '"\\', "语語"]), max_size=2),
        ),
        "include_stop_str_in_output": st.booleans(),
        "stream_options": st.fixed_dictionaries(
            {"include_usage": st.booleans()}, optional={"continuous_usage_stats": st.booleans()}
        ),
        "lp": st.integers(0, 2),
    },
)


def for_path(path: str, body: dict[str, Any]) -> dict[str, Any]:
    body = dict(body)
    if "min_tokens" in body and body["min_tokens"] > body.get("max_tokens", 16):
        del body["min_tokens"]
    most = body.pop("lp", None)
    if most is not None:
        body |= {"logprobs": True, "top_logprobs": most} if path == CHAT else {"logprobs": most}
    return body


def examples_of(test: Any) -> Any:
    return settings(max_examples=examples(160), deadline=None)(test)


paths = pytest.mark.parametrize("path", [CHAT, COMPLETION])


@paths
@pytest.mark.parametrize("chunk", [1, 5])
def test_a_stream_goes_on_as_if_it_had_not_been_cut(path: str, chunk: int) -> None:
    @examples_of
    @given(
        answers(),
        bodies,
        st.integers(1, 60),
        st.lists(st.integers(0, 5000), max_size=4),
        st.lists(st.integers(0, 12), max_size=3),
        st.booleans(),
    )
    def check(
        answer: list[int],
        own: dict[str, Any],
        cut: int,
        pieces: list[int],
        further: list[int],
        later: bool,
    ) -> None:
        engine, body = TextEngine(answer, chunk, later=later), for_path(path, own)
        whole = b"".join(engine.events(path, request(path, body)[0]))
        had, kept = broken(engine, path, body, cut + (path == CHAT), pieces)
        assume(kept.complete or not kept.check())
        stream = had + goes_on(engine, kept, further)
        if chunk == 1:
            # The last event of a chat of 0.33 has it, that of a completion is behind the break.
            nothing = b',"weight_versions":null'
            assert stream.replace(nothing, b"") == whole.replace(nothing, b"")
        assert joined(stream) == joined(whole)

    check()


def test_a_long_text_is_decoded_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever a step ends, within a character or not."""

    @examples_of
    @given(answers(), st.integers(1, 60), st.integers(1, 7))
    def check(answer: list[int], cut: int, step_len: int) -> None:
        _, kept = broken(TextEngine(answer), COMPLETION, {"stop": ["zz", "a very long one"]}, cut)
        assume(not kept.complete and not kept.check())
        tokens = whole_tokens(kept.ids, decode)
        assert tokens is not None
        sizes: list[int] = []

        def counted(ids: Sequence[int]) -> str:
            sizes.append(len(ids))
            return decode(ids)

        with monkeypatch.context() as patch:
            patch.setattr(continuation, "_STEP_LEN", step_len)
            in_steps = at_once(text_so_far(kept, tokens, counted))
        in_one = at_once(text_so_far(kept, tokens, decode))
        assert in_steps is not None
        assert in_one is not None
        assert in_steps.passed(flush=True) == in_one.passed(flush=True)
        assert max(sizes, default=0) <= step_len + 16

    check()


@paths
def test_a_stream_that_passes_is_what_it_would_be_without_ids(path: str) -> None:
    @examples_of
    @given(answers(), bodies, st.lists(st.integers(0, 5000), max_size=6), st.booleans())
    def check(answer: list[int], own: dict[str, Any], pieces: list[int], later: bool) -> None:
        engine, body = TextEngine(answer, later=later), for_path(path, own)
        had, kept = broken(engine, path, body, 1000, pieces)
        assert had == b"".join(engine.events(path, request(path, body)[0]))
        assert kept.complete
        assert not kept.closing()
        assert [*kept.ids] == engine.answer[: len(kept.ids)]

    check()


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"n": 2}, "answers"),
        ({"n": 1}, ""),
        ({"best_of": 3}, "answers"),
        ({"use_beam_search": True}, "answers"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [], "tool_choice": "none"}, ""),
        ({"tool_choice": "required"}, "tools"),
        ({"tool_choice": {"type": "function"}}, "tools"),
        ({"response_format": {"type": "json_object"}}, "format"),
        ({"response_format": {"type": "text"}}, ""),
        ({"structured_outputs": {"regex": "a"}}, "format"),
        ({"guided_json": {}}, ""),
        ({"guided_regex": "a"}, "format"),
        ({"presence_penalty": 0.5}, "penalty"),
        ({"presence_penalty": 0}, ""),
        ({"bad_words": ["a b"]}, "bad_words"),
        ({"bad_words": []}, ""),
        ({"repetition_detection": {"max_pattern_size": 2}}, "repetition"),
        ({"prompt_embeds": "AAAA"}, "media"),
        ({"vllm_xargs": {"a": 1}}, "parameter"),
        ({"kv_transfer_params": {"a": 1}}, "parameter"),
        ({"return_token_ids": True}, "parameter"),
        ({"return_token_ids": False}, "parameter"),
        ({"echo": True}, "parameter"),
        ({"echo": False}, ""),
        ({"suffix": "b"}, "parameter"),
        ({"a_field_of_2027": 1}, "parameter"),
        ({"a_field_of_2027": None}, ""),
        ({"max_tokens": "12"}, ""),
        ({"max_tokens": -1}, "parameter"),
        ({"max_tokens": 10**30}, "parameter"),
        ({"seed": 2**70}, "parameter"),
        ({"stop": 5}, "parameter"),
        ({"stop": [5]}, "parameter"),
        ({"logit_bias": {"x": 1}}, "parameter"),
        ({"logit_bias": [1]}, "parameter"),
        ({"stream_options": "x"}, "parameter"),
        ({"temperature": 0.7, "top_k": 4, "seed": 3, "min_p": 0.1, "cache_salt": "s", "priority": 1}, ""),
    ],
)
@paths
def test_the_body_decides_whether_a_stream_may_go_on(path: str, body: dict[str, Any], reason: str) -> None:
    found = plan_of(path, json.dumps({"model": "m", "prompt": "a", "messages": [], **body}).encode())
    assert ("" if isinstance(found, ContinuationPlan) else found) == reason


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b'{"a":' + b"[" * 5000, b'{"max_tokens":1e999}'])
def test_a_body_that_is_not_read_does_not_go_on(body: bytes) -> None:
    assert plan_of(COMPLETION, body) == "parameter"


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]], [[1]]])
def test_several_prompts_do_not_go_on(prompt: Any) -> None:
    assert plan_of(COMPLETION, json.dumps({"prompt": prompt}, indent=1).encode()) == "answers"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_other_apis_do_not_go_on(path: str) -> None:
    assert plan_of(path, b"{}") == "api"


def kept_of(
    body: dict[str, Any], ids: Sequence[int] = (20, 20, 21), known: Sequence[int] | None = None
) -> KeptStream:
    kept = KeptStream(request(COMPLETION, body)[1], known)
    choice = {
        "index": 0,
        "text": "x",
        "logprobs": None,
        "finish_reason": None,
        "prompt_token_ids": PROMPT,
        "token_ids": ids,
    }
    passed = kept.feed(TextEngine.event({"id": "i", "choices": [choice]}))
    assert b'token_ids":[' not in passed
    return kept


def asked(kept: KeptStream, context: int | None = 100) -> dict[str, Any]:
    body = completion_of(kept, len(kept.ids), context)
    assert isinstance(body, bytes)
    found = json.loads(body)
    assert found.pop("prompt") == [*PROMPT, *kept.ids]
    assert found.pop("stream")
    assert found.pop("model") == "m"
    assert found.pop("return_token_ids")
    found.pop("stream_options")
    return found


def test_limits_are_less_the_tokens_that_are_kept() -> None:
    assert asked(kept_of({"max_tokens": 10, "min_tokens": 5})) == {"max_tokens": 7, "min_tokens": 2}
    assert asked(kept_of({"max_tokens": 10, "min_tokens": 2})) == {"max_tokens": 7}
    assert asked(kept_of({})) == {"max_tokens": 13}
    assert asked(kept_of({"max_tokens": 500})) == {"max_tokens": 93}
    assert asked(kept_of({"max_tokens": 500}), context=None) == {"max_tokens": 497}
    assert completion_of(kept_of({"max_tokens": 3}), 3, 100) is None
    kept = kept_of({})
    kept.plan = msgspec.structs.replace(kept.plan, max_tokens=None)
    assert completion_of(kept, 3, None) == "context"
    assert asked(kept) == {"max_tokens": 93}


def test_other_random_numbers_are_asked_for() -> None:
    assert asked(kept_of({"seed": 5}))["seed"] == 8
    assert asked(kept_of({"seed": 2**63 - 2}))["seed"] == 2**63 - 1


def test_a_penalty_counts_what_was_said_before() -> None:
    found = asked(kept_of({"frequency_penalty": 0.5, "logit_bias": {"20": 3, "7": -1}}))
    assert found["logit_bias"] == {"20": 2.0, "21": -0.5, "7": -1}
    assert found["frequency_penalty"] == 0.5
    most = kept_of({"frequency_penalty": 2, "max_tokens": 60}, [20] * 50)
    assert asked(most)["logit_bias"] == {"20": -100.0}
    many = kept_of({"frequency_penalty": 2, "max_tokens": 60}, [20] * 51)
    assert completion_of(many, 51, 100) == "penalty"


def test_other_parameters_stay_as_they_are() -> None:
    own = {"temperature": 0.25, "stop_token_ids": [5], "cache_salt": "é", "priority": -1, "logprobs": 2}
    assert asked(kept_of({**own, "user": None})) == {**own, "max_tokens": 13}
    assert asked(kept_of({"stop": ["x"]})) == {"max_tokens": 13}


def test_known_ids_of_the_prompt_are_not_kept_twice() -> None:
    assert kept_of({}, known=PROMPT).prompt is PROMPT
    assert kept_of({}, known=[*PROMPT[:-1], 9]).prompt == b"7,300,11,12"
    assert kept_of({}, known=PROMPT[1:]).prompt == b"7,300,11,12"


def test_an_abort_is_not_kept_and_an_error_not_shown() -> None:
    kept = kept_of({})
    choice = {"index": 0, "text": "y", "logprobs": None, "finish_reason": "abort", "token_ids": [9]}
    event = TextEngine.event({"id": "i", "choices": [choice]})
    assert kept.feed(event) == event.replace(b"[9]", b"null")
    assert not kept.complete
    assert [*kept.ids] == [20, 20, 21]
    error = TextEngine.event({"error": {"message": "EngineCore died", "code": 500}})
    assert kept.feed(error + DONE) == b""
    assert kept.failed == 500
    assert not kept.check()


@pytest.mark.parametrize("ids", ["[-1]", "[1.5]", '["a"]', "[4294967296]", "[1,,2]"])
def test_ids_that_are_none_end_it(ids: str) -> None:
    kept = kept_of({})
    kept.feed(
        b'data: {"choices":[{"index":0,"text":"","finish_reason":null,"token_ids":%b}]}\n\n' % ids.encode()
    )
    assert kept.check() == "ids"


def test_an_end_that_cannot_be_read_ends_it() -> None:
    kept = kept_of({})
    kept.feed(b'data: {"choices":[{"index":0,"text":"","finish_reason":5,"token_ids":[9]}]}\n\n')
    assert kept.check() == "ids"


def test_a_stream_that_many_engines_gave_up_goes_to_no_further_one() -> None:
    kept = kept_of({})
    kept.aborts = 15
    assert not kept.check()
    kept.aborts = 16
    assert kept.check() == "broken"


def test_an_engine_without_ids_is_passed_on_unchanged() -> None:
    whole, plan = request(CHAT, {})
    kept = KeptStream(plan)
    stream = b"".join(TextEngine([token(b"a")] * 3).events(CHAT, whole))
    assert kept.feed(stream) == stream
    assert kept.check() == "ids"


def test_reasoning_goes_on_only_after_it_is_over() -> None:
    _, plan = request(CHAT, {})
    kept = KeptStream(plan)

    def event(delta: dict[str, str], one: int) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [one]}
        return TextEngine.event({"id": "i", "choices": [choice]})

    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    kept.feed(TextEngine.event({"id": "i", "choices": [first], "prompt_token_ids": PROMPT}))
    kept.feed(event({"reasoning": "hm"}, 50))
    assert kept.check() == "reasoning"
    assert kept.feed(event({}, 51)) == b""
    assert kept.check() == "reasoning"
    kept.feed(event({"content": "yes"}, 52))
    assert not kept.check()
    assert [*kept.ids] == [50, 51, 52]


@paths
@pytest.mark.parametrize("later", [False, True])
def test_later_events_are_not_decoded(path: str, later: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan = request(path, {})
    kept = KeptStream(plan)
    engine = TextEngine([token(b"ab")] * 9, later=later)
    events = list(engine.events(path, {**request(path, {})[0], "return_token_ids": True}))
    for event in events[:3]:
        kept.feed(event)
    monkeypatch.setattr(KeptStream, "_event", None)
    had = len(kept.ids)
    assert b"".join(map(kept.feed, events[3:6])).count(b'"token_ids":null') == 3
    assert len(kept.ids) == had + 3


@pytest.mark.parametrize("piece", [b"<", b" <", "漢<".encode()])
@pytest.mark.parametrize("before", [0, 3, 12])
def test_text_that_a_parser_holds_back_is_noticed(piece: bytes, before: int) -> None:
    """vLLM's qwen3 parser waits behind ``<`` (0.32), in chats without tools too."""
    _, plan = request(CHAT, {})
    kept = KeptStream(plan)

    def event(text: str, one: int) -> bytes:
        delta = {"content": text} if text else {}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None, "token_ids": [one]}
        return TextEngine.event({"id": "i", "choices": [choice]})

    first = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    kept.feed(TextEngine.event({"id": "i", "choices": [first], "prompt_token_ids": PROMPT}))
    for word in ["x ", *["<b> 🙂"] * before]:
        kept.feed(event(word, token(word.encode())))
    assert not kept.check()
    assert not held_back(kept, len(kept.ids), decode)
    kept.feed(event(piece.decode()[:-1], token(piece)))
    assert held_back(kept, len(kept.ids), decode)
    kept.feed(event("<b", token(b"b")))
    assert not held_back(kept, len(kept.ids), decode)
