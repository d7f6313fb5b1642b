"""Paths of LoRA adapters: what is configured wins, what engines say comes and goes with them."""

from __future__ import annotations

from router.prompts.reader import AdapterPaths
from router.prompts.settings import ANY_MODEL

CONFIGURED = {"m": {"sql": "/here"}, ANY_MODEL: {}}


def test_what_is_configured_is_not_replaced_and_stays_when_engines_leave() -> None:
    adapters = AdapterPaths(CONFIGURED)
    adapters.learn("m", {"sql": "/there", "law": "/law"})
    assert adapters.paths_of_model("m") == {"sql": "/here", "law": "/law"}
    adapters.keep("m", ["other"])
    assert adapters.paths_of_model("m") == {"sql": "/here"}
    assert CONFIGURED["m"] == {"sql": "/here"}


def test_models_that_are_not_named_share_theirs() -> None:
    adapters = AdapterPaths(CONFIGURED)
    adapters.learn("other", {"law": "/law"})
    assert adapters.paths_of_model("another") == adapters.paths_of_model(ANY_MODEL) == {"law": "/law"}
    assert "law" not in adapters.paths_of_model("m")


def test_who_was_given_a_dict_sees_the_next_configuration() -> None:
    adapters = AdapterPaths(CONFIGURED)
    named, rest = adapters.paths_of_model("m"), adapters.paths_of_model("other")
    soon = adapters.named("new", {"sql": "/new"})  # read before it is configured
    adapters.learn("m", {"law": "/law"})
    adapters.configure({"new": {"sql": "/newer"}, ANY_MODEL: {"tax": "/tax"}})
    assert (named, rest, soon) == ({}, {"tax": "/tax"}, {"sql": "/newer"})
    assert adapters.paths_of_model("new") is soon
    assert adapters.paths_of_model("m") is rest


def test_what_one_unnamed_model_has_is_told_from_what_another_has() -> None:
    """Their tokenizers may differ: an adapter's prompts are made with its own model's."""
    adapters = AdapterPaths(CONFIGURED)
    one, another = adapters.own_paths("one"), adapters.own_paths("another")
    adapters.learn("one", {"law": "/law"})
    adapters.learn("another", {"tax": "/tax"})
    assert (one, another) == ({"law": "/law"}, {"tax": "/tax"})
    assert adapters.own_paths("m") is adapters.paths_of_model("m")
    adapters.keep("one", [])
    assert (one, another) == ({}, {"tax": "/tax"})
    adapters.configure({ANY_MODEL: {"sql": "/here"}})
    assert (one, another) == ({"sql": "/here"}, {"sql": "/here"})
