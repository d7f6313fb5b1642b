"""One prompt computed before: its messages, tokens and hashes, from which a next turn goes on."""

from __future__ import annotations

import msgspec

from publisher.block_hash import HashChain, HashScheme, PromptExtras, num_hash_blocks
from router.prompts.chat.messages import Message
from router.prompts.tokens.cut_text import CutText
from router.prompts.tokens.ids import Ids


class KnownMessage(msgspec.Struct, frozen=True, gc=False):
    """A message of a request and what was made of it.

    ``message`` is what a template is given, ``shape`` names its kind (0: nobody asks), ``num_values`` is how
    many lists and objects are in it, at most; ``images`` are digests. ``weight_bytes`` is its whole memory.
    """

    raw: msgspec.Raw
    message: Message
    shape: int
    num_values: int
    weight_bytes: int
    images: tuple[bytes, ...] = ()
    plain_role: str = ""
    """Of what a template sees as a role and a text that is not empty, and nothing else."""
    plain_text: str = ""
    """That text; empty where there is no such role."""


class Entry(msgspec.Struct, eq=False, gc=False):
    """One prompt. Thousands are kept, so it is made of what the garbage collector does not go through.

    ``scope`` is everything besides messages that the text and hashes depend on, compact. ``media`` are the
    digests of all images, in order: where there are any, ``ids`` has the template's marks for them and is no
    prompt.
    """

    keys: tuple[int, ...]
    scope: bytes
    ids: Ids
    extras: PromptExtras
    messages: tuple[KnownMessage, ...] = ()
    media: tuple[bytes, ...] = ()
    cut: CutText | None = None
    """None: the ids are not those of a text alone, or the family makes them."""
    chains: dict[HashScheme, HashChain] = {}
    size_bytes: int = 0

    def begins_as(self, scope: bytes, raws: list[msgspec.Raw]) -> bool:
        """Whether its first messages are these, byte by byte."""
        known = self.messages if len(raws) == len(self.messages) else self.messages[: len(raws)]
        return self.scope == scope and [one.raw for one in known] == raws

    def inherit(self, other: Entry, num_tokens: int, *, last: bool) -> None:
        """Take over the hashes of the first ``num_tokens`` tokens, which both prompts share.

        ``last``: nobody will find the other one any more, so that nothing of them needs to be copied.
        """
        if other.extras != self.extras:
            return
        for scheme, chain in other.chains.items():
            known, shared = len(chain.hashes), num_hash_blocks(num_tokens, scheme)
            blocks = shared if shared < known else known  # noqa: FURB136  # a call less
            if scheme not in self.chains:
                self.chains[scheme] = chain.cut(blocks) if last else chain.fork(blocks)
        if last:
            other.chains = {}
