"""Each wait between a look at the fleet and its use is known, with what is asked again after it.

A prompt is read or computed for seconds, and engines drain, fall asleep, go down or change their model
meanwhile (tests/router/app/test_changed_meanwhile.py). A new ``await`` on the way of a request belongs into
this table, with its reason.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Final

from kvatlas.router.placement import decide
from kvatlas.router.proxy import disaggregated, engine_page, forward, warming

AGAIN: Final = "the fleet is asked again if it changed (`Planner._decide`)"
CHECKED: Final = "the engine is asked again (`Attempt.check_eligible`)"
INNER: Final = "its waits are in this table"
PLACED: Final = "the next look at the fleet is a new placement"
SENT: Final = "the request is at its engine; an engine that goes down or restarts ends it"
OVER: Final = "no engine is asked any more"
OTHER: Final = "asks another server, and chooses nothing by what it knew of the fleet"
WAITS: Final[dict[str, dict[tuple[str, str], str]]] = {
    "decide": {
        ("place", "self._decide"): INNER,
        ("place", "gate.wait"): "a new decision is made, with the room that it gave",
        ("explain", "self._decide"): INNER,
        ("_decide", "self._reader.read"): AGAIN,
        ("_decide", "self._find_edits"): AGAIN,
        ("_decide", "self._look_ahead"): AGAIN,
        ("_look_ahead", "self._reader.hashes"): AGAIN,
        ("_look_ahead", "run_cooperatively"): AGAIN,
        ("_decide", "self._look"): AGAIN,
        ("_find_edits", "apart.read_body"): AGAIN,
        ("_find_edits", "self.pulls.body"): AGAIN,
        ("_look", "shared.look"): AGAIN,
    },
    "forward": {
        ("forward", "self._forward"): INNER,
        ("forward", "self._go_on"): INNER,
        ("_go_on", "self._continuation"): INNER,
        ("_hand_over", "self._continuation"): INNER,
        ("_continuation", "run_cooperatively"): PLACED,
        ("_go_on", "self._go_on_with"): INNER,
        ("_go_on_with", "self._forward"): INNER,
        ("_go_on_with", "self._write_end"): OVER,
        ("_hand_over", "self._go_on_with"): INNER,
        ("_warm", "self._warmer.warm"): INNER,
        ("_ask_warm", "self._legs.prefill"): CHECKED,
        ("_ask_warm", "self._ask"): SENT,
        ("_write_end", "waits"): OVER,
        ("_forward", "self._place_continued"): INNER,
        ("_place_continued", "self._turns.place"): INNER,
        ("_place_continued", "self._planner.place"): INNER,
        ("forward", "self._end_stream"): OVER,
        ("_end_stream", "waits"): OVER,
        ("_forward", "self._planner.place"): INNER,
        ("_forward", "self._place_again"): INNER,
        ("_forward", "self._note_harm"): PLACED,
        ("_note_harm", "self._hold_if_dead"): PLACED,
        ("_place_again", "self._deaths.check"): PLACED,
        ("_forward", "self._note_break"): PLACED,
        ("_note_break", "self._hold_if_dead"): PLACED,
        ("_hold_if_dead", "deaths.ended"): PLACED,
        ("_forward", "self._attempt"): PLACED,
        ("_forward", "self._give_up"): OVER,
        ("_place_again", "self._planner.place"): INNER,
        ("_attempt", "self._exchange"): INNER,
        ("_attempt", "self._legs.prefill"): CHECKED,
        ("_give_up", "answer_whole"): OVER,
        ("_exchange", "self._ask_first"): INNER,
        ("_ask_compared", "stream.differs"): CHECKED,
        ("_ask_compared", "self._own.whole"): CHECKED,
        ("ask", "self._own.whole"): CHECKED,
        ("_ask_compared", "self._ask"): SENT,
        ("_exchange", "self._ask_without_order"): SENT,
        ("_exchange", "self._pass_on"): OVER,
        ("_exchange", "self._refuse"): PLACED,
        ("_pass_on", "self._not_a_stream"): OVER,
        ("_pass_on", "rest"): OVER,
        ("_pass_on", "self._not_too_long"): OVER,
        ("_not_too_long", "connection.read"): PLACED,
        ("_not_too_long", "self._read_refusal"): PLACED,
        ("_not_a_stream", "self._read_refusal"): OVER,
        ("_refuse", "self._read_refusal"): PLACED,
        ("_ask_without_order", "self._ask"): SENT,
        ("_ask_changed", "run_cooperatively"): CHECKED,
        ("_ask_changed", "carrier.ask"): SENT,
        ("_read_refusal", "connection.read"): PLACED,
    },
    "warming": {
        ("warm", "self._turns.place"): INNER,
        ("warm", "self._computed"): INNER,
        ("_computed", "ask"): INNER,
        ("_computed", "_whole"): SENT,
        ("_whole", "answer.read"): SENT,
        ("_run", "self._warm"): PLACED,
    },
    "disaggregated": {
        ("prefill", "self._ask_prefill"): INNER,
        ("_ask_prefill", "run_cooperatively"): CHECKED,
        ("_ask_prefill", "self._carrier.ask"): SENT,
        ("_ask_prefill", "self._read"): SENT,
        ("_ask_prefill", "self._hand_over"): CHECKED,
        ("_hand_over", "self.connector.decode_params"): CHECKED,
        ("_read", "answer.read"): SENT,
        ("fetch", "run_cooperatively"): CHECKED,
        ("fetch", "self._witnessed"): SENT,
        ("fetch", "asking"): SENT,
        ("_witnessed", "asyncio.gather"): SENT,
        ("_witnessed", "asking"): SENT,
        ("ask", "asking"): SENT,
        ("_witnessed", "self._expired_leases"): OTHER,
        ("_count_before", "came.wait"): SENT,
        ("_count_before", "self._expired_leases"): OTHER,
        ("_expired_leases", "self._metrics"): OTHER,
    },
    "engine_page": {
        ("__call__", "self._client.request"): OTHER,
        ("__call__", "answer.read"): OTHER,
    },
}
MODULES: Final = {
    "decide": decide,
    "forward": forward,
    "warming": warming,
    "disaggregated": disaggregated,
    "engine_page": engine_page,
}


def named(awaited: ast.expr) -> set[str]:
    """Events that are awaited; of a choice, both."""
    if isinstance(awaited, ast.IfExp):
        return named(awaited.body) | named(awaited.orelse)
    return {ast.unparse(awaited.func if isinstance(awaited, ast.Call) else awaited)}


def test_every_wait_is_known_with_what_is_asked_again_after_it() -> None:
    for module, table in WAITS.items():
        tree = ast.parse(Path(str(MODULES[module].__file__)).read_text())
        found = {
            (function.name, name)
            for function in ast.walk(tree)
            if isinstance(function, ast.AsyncFunctionDef)
            for wait in ast.walk(function)
            if isinstance(wait, ast.Await)
            for name in named(wait.value)
        }
        assert found - table.keys() == set(), f"{module}: say what is asked again after these waits"
        assert table.keys() - found == set(), f"{module}: these waits are gone"
