"""A seeded sweep of JSON values through the places of a chat that reach a template, as raw bytes.

Frontends of engines parse the same body by different libraries: what one of them writes differently must not
be made here. Texts, not values: 1.0, 1.00 and 10e-1 are one value of Python, and three of a sweep.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Iterator, Sequence

_DIGITS = "0123456789"
_EDGES = (
    "0 -0 1 -1 9007199254740991 9007199254740993 -9007199254740993 9223372036854775807 "
    "9223372036854775808 -9223372036854775808 -9223372036854775809 18446744073709551615 "
    "18446744073709551616 10000000000000000000000000000000000000000 123456789012345678901234567890 0.0 "
    "-0.0 1.0 0.1 0.10 1.5 2.50 100.25 0.30000000000000004 1e0 1E5 1e-5 0.0001 0.00001 0.000012345 1e15 "
    "1e16 1e22 1e23 1e308 1e400 5e-324 1e-400 1700000000.123456 1700000000.1234567 1732867200.9999999 "
    "123456789.12345678 0.1234567890123456 99999999999999.94 8.41 1.7976931348623157e308 "
    "2.2250738585072014e-308 4.35 0.000001 1234567890123456.5 0.1000000000000000055511151231257827 "
    "10000000000000000.5 3.14159265358979 "
)
EDGES = tuple(_EDGES.split())
TEXTS = (
    "", "a", "\xe9", "e\u0301", "\u65e5\u672c\u8a9e", "\U0001f600", "\u2028\u2029", "\x00\x01\x1f",
    "\x7f\x80", "\ufeff", "\ufffe", "\U0010ffff", "<&>'\"\\/", "\\n", "\t\n\r\x08\x0c", "a\xa0b",
    "\u200b\u200d", "\u0130\u0131\u017fK", "1.0", "true", "null", "{{ x }}", "%}",
)  # fmt: skip


def number(rng: random.Random) -> str:
    """A number as a client may write it."""
    kind = rng.randrange(4)
    if kind == 0:
        return rng.choice(EDGES)
    sign = rng.choice(("", "", "-"))
    whole = str(rng.randrange(10 ** rng.randint(1, 20)))
    if kind == 1:
        return sign + whole
    part = "".join(rng.choice(_DIGITS) for _ in range(rng.randint(1, 20)))
    if kind == 2:
        # Digits together from 2 to 20, most of all around those that a float can hold.
        digits = rng.choice((2, 5, 9, 14, 15, 15, 16, 16, 17, 17, 18, 20))
        split = rng.randrange(1, digits)
        text = str(rng.randrange(10 ** (digits - 1), 10**digits))
        return f"{sign}{text[:split]}.{text[split:]}"
    return f"{sign}{whole[:3]}.{part}{rng.choice('eE')}{rng.choice(('', '+', '-'))}{rng.randrange(30)}"


def text(rng: random.Random) -> str:
    """A string, with or without escapes."""
    made = rng.choice(TEXTS) + rng.choice(TEXTS)
    return json.dumps(made, ensure_ascii=rng.random() < 0.5)


def value(rng: random.Random, depth: int = 3) -> str:
    """A JSON value as text."""
    kind = rng.randrange(9 if depth else 6)
    if kind < 3:
        return number(rng)
    if kind == 3:
        return text(rng)
    if kind < 6:
        return rng.choice(("true", "false", "null"))
    items = [value(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind < 8:
        space = rng.choice(("", " "))
        # Equal names are kept apart from each other by their number, but for one in ten.
        names = [
            json.dumps(rng.choice(TEXTS) + str(at if rng.random() > 0.1 else 0)) for at in range(len(items))
        ]
        return (
            "{"
            + f",{space}".join(f"{name}:{space}{item}" for name, item in zip(names, items, strict=True))
            + "}"
        )
    return "[" + ", ".join(items) + "]"


def chats(seed: int, count: int) -> Iterator[bytes]:
    """Bodies of chats, each with values in the arguments of a tool call, in a tool's schema or in template
    arguments."""
    rng = random.Random(seed)
    for _ in range(count):
        place = rng.randrange(4)
        given = value(rng)
        messages = '{"role":"user","content":"go"}'
        more = ""
        if place == 0:
            arguments = f'{{"a": {given}, "b": {number(rng)}}}'
            if rng.random() < 0.1:
                arguments = given
            function = f'{{"name":"f","arguments":{json.dumps(arguments)}}}'
            call = f'{{"id":"call12345","type":"function","function":{function}}}'
            messages += f',{{"role":"assistant","content":null,"tool_calls":[{call}]}}'
            messages += ',{"role":"tool","tool_call_id":"call12345","content":"1"}'
        elif place == 1:
            function = f'{{"name":"f","parameters":{{"type":"object","a":{given},"b":{number(rng)}}}}}'
            more = f',"tools":[{{"type":"function","function":{function}}}]'
        elif place == 2:
            name = rng.choice(("custom", "custom", "custom", "enable_thinking", "add_generation_prompt"))
            more = f',"chat_template_kwargs":{{"{name}":{given}}}'
        else:
            fields = (
                "thinking",
                "reasoning",
                "reasoning_content",
                "name",
                "refusal",
                "extra",
                "prefix",
                "audio",
            )
            message = f'{{"role":"assistant","content":"x","{rng.choice(fields)}":{given}}}'
            messages += f',{message},{{"role":"user","content":{text(rng)}}}'
        yield f'{{"model":"m","messages":[{messages}]{more}}}'.encode(errors="surrogatepass")


_CALLS = "{% for c in m.tool_calls or [] %}"
_ARGUMENTS = "{% for k, v in c.function.arguments"
TEMPLATES = {
    "json": "{% for m in messages %}{{ m.role }}{{ m.content }}" + _CALLS + "{{ c.function | tojson }}"
    "{% endfor %}{{ m.reasoning }}{% endfor %}{{ tools | tojson if tools else '' }}"
    "{{ custom | tojson if custom else '' }}"
    "{% if add_generation_prompt %}>{% endif %}{{ enable_thinking }}",
    "printed": "{% for m in messages %}{{ m.content }}"
    + _CALLS
    + _ARGUMENTS
    + ".items() %}<{{ k }}>{{ v }}|{% endfor %}{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}{% for k, v in t.function.parameters.items() %}<{{ k }}>{{ v }}|{% endfor %}"
    "{% endfor %}{{ custom }}{% if custom is string %}s{% endif %}{% if custom %}T{% endif %}",
    "types": "{% for m in messages %}"
    + _CALLS
    + _ARGUMENTS
    + " | items %}{{ k }}={{ v if v is string else v | tojson }};{% endfor %}{% endfor %}{{ m.content }}"
    "{{ m.thinking }}{{ m.prefix }}{% endfor %}{% for t in tools or [] %}{{ t | tojson(indent=2) }}"
    "{% endfor %}{{ custom is mapping }}{{ custom is number }}",
}
"""Uses of a value in a template: as JSON, printed, by its type."""


def digest(data: bytes) -> str:
    """Short digest for recordings."""
    return hashlib.sha256(data).hexdigest()[:10]


def digest_of_ids(ids: Sequence[int]) -> str:
    """The same of token ids."""
    return digest(array("I", ids).tobytes())
