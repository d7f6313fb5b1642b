"""JSON bodies that take longest to look through, in any size: what a hostile client would send."""

from __future__ import annotations

from typing import Final

_HEAD: Final = b'{"model":"m","vllm_xargs":{},'


def _repeated(unit: bytes, size: int, *, head: bytes = _HEAD, tail: bytes = b'"z":1}') -> bytes:
    return head + unit * ((size - len(head) - len(tail)) // len(unit)) + tail


def _within(value: bytes, size: int, *, opens: bytes = b"[", closes: bytes = b"1]") -> bytes:
    return _repeated(value, size, head=_HEAD + b'"a":' + opens, tail=closes + b"}")


_MEMBERS: Final = {
    "short members": b'"a":1,',
    "empty members": b'"":"",',
    "spaced members": b'"a" :\t1 , ',
    "escaped keys": b'"\\u0061":1,',
    "escaped values": b'"a":"\\n",',
    "lists as members": b'"a":[],',
    "objects looked into": b'"vllm_xargs":{"a":1},',
    "texts looked into": b'"vllm_xargs":"\\n",',
    "what is cut out": b'"kv_transfer_params":1,"a":1,',
    "models": b'"model":"m",',
    "long keys": b'"%b":1,' % (b"k" * 100_000),
}
_VALUES: Final = {
    "numbers": b"1,",
    "lists": b"[],",
    "empty texts": b'"",',
    "escaped texts": b'"\\n",',
    "objects": b'{"":0},',
}


def worst_bodies(size: int) -> dict[str, bytes]:
    """By what is in them; each has this many bytes, or nearly."""
    inner = _HEAD.replace(b"{},", b"{")
    return {
        **{name: _repeated(unit, size) for name, unit in _MEMBERS.items()},
        **{f"a list of {name}": _within(unit, size) for name, unit in _VALUES.items()},
        "members of an object looked into": _repeated(b'"a":1,', size, head=inner, tail=b'"z":1}}'),
        "depth": _within(b"[", size),
        "white space": _within(b" ", size, opens=b"", closes=b"1"),
        "a number": _within(b"1", size, opens=b"", closes=b"1"),
        "a text": _within(b"x", size, opens=b'"', closes=b'"'),
        "a text of escapes": _within(b"\\n", size, opens=b'"', closes=b'"'),
        "a text of quotes": _within(b'\\"', size, opens=b'"', closes=b'"'),
        "a text of spread escapes": _within(b"\\nxxxxxxx", size, opens=b'"', closes=b'"'),
        "a text without end": _within(b"kv_transfer_param ", size, opens=b'"', closes=b""),
        "a text that is looked into": _repeated(b"x", size, head=b'{"vllm_xargs":"', tail=b'"}'),
    }


_LAST_TURN: Final = b'{"role":"user","content":"And then?"}],"max_tokens":1}'


def long_prompts(size: int) -> dict[str, tuple[str, bytes]]:
    """Requests of this many bytes, or nearly, by what their prompts are: path and body."""
    words, model = b"The quick router reads a long story about a small engine. ", b'{"model":"kvatlas-demo",'
    turn = b'{"role":"user","content":"%s"},{"role":"assistant","content":"Yes."},' % (words * 8)
    text, text_end = model + b'"messages":[{"role":"user","content":"', b'"}],"max_tokens":1}'
    many = model + b'"max_tokens":1,"prompt":['
    chats = {
        "a text": _repeated(words, size, head=text, tail=text_end),
        "a text of one word": _repeated(b"story", size, head=text, tail=text_end),
        "a text without words": _repeated(b"\\u00e9\\u4e2d", size, head=text, tail=text_end),
        "white space in a text": _repeated(b" ", size, head=text, tail=text_end),
        "turns": _repeated(turn, size, head=model + b'"messages":[', tail=_LAST_TURN),
    }
    completions = {
        "ids": _repeated(b"123,", size, head=many, tail=b"1]}"),
        "short ids": _repeated(b"1,", size, head=many, tail=b"1]}"),
        "prompts of an id": _repeated(b"[1],", size, head=many, tail=b"[1]]}"),
        "ids and a text": _repeated(b"123,", size, head=many, tail=b'"a"]}'),
        "texts": _repeated(b'"The quick router.",', size, head=many, tail=b'"a"]}'),
        "one text": _repeated(words, size, head=model + b'"max_tokens":1,"prompt":"', tail=b'"}'),
    }
    return {name: ("/v1/chat/completions", body) for name, body in chats.items()} | {
        name: ("/v1/completions", body) for name, body in completions.items()
    }
