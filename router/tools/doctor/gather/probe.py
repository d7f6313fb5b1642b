"""Two small requests to one engine: does it publish what it computes, and is the predicted hit the real one?

The first prompt is new (random words); the second begins with it. Both are read and predicted by the parts
that serve traffic. Costs the engine the prefill of both prompts and two tokens.
"""

from __future__ import annotations

from router.tools.doctor.evidence import ProbeEvidence
from router.tools.doctor.gather.asker import MARGIN_TOKENS, Asker

_FIRST_TOKENS = 600
"""Where the layout is not known yet: four of the largest common blocks (128) and a little."""
_BLOCKS = 3


async def probe(asker: Asker) -> ProbeEvidence:
    """Both requests; the first once more with a longer prompt where the blocks turn out to be large."""
    seen = ProbeEvidence(requests=[])
    length = _wanted_tokens(asker)
    first = await asker.text(length)
    seen.requests.append((await asker.send({"prompt": first})).request)
    if seen.requests[-1].status:
        return seen
    await asker.detect()
    if _wanted_tokens(asker) > length:
        first = await asker.text(_wanted_tokens(asker))
        seen.requests.append((await asker.send({"prompt": first})).request)
        await asker.detect()
    if not seen.requests[-1].status:
        second = await asker.text(_wanted_tokens(asker) + MARGIN_TOKENS, first)
        seen.requests.append((await asker.send({"prompt": second}, await_events=False)).request)
    return seen


def _wanted_tokens(asker: Asker) -> int:
    alignment = asker.alignment
    wanted = _FIRST_TOKENS if alignment is None else _BLOCKS * alignment + MARGIN_TOKENS
    return max(2, min(wanted, asker.max_tokens))
