"""Each line of the page's table of what a tenant can do is held by tests, which are named here."""

from __future__ import annotations

import ast

from tests.support.paths import ROOT

HELD_BY = {
    "models listed": "app/test_keys.py::test_models_are_listed_for_those_who_may_use_them",
    "models requested": (
        "app/test_keys.py::test_each_refusal_as_the_openai_client_sees_it "
        "proxy/test_forms.py::test_an_upload_goes_to_an_engine_that_serves_its_model"
    ),
    "a model's name hidden": (
        "prompts/test_large_bodies.py::test_no_spelling_hides_a_model_in_a_body_above_4_mib "
        "prompts/test_large_bodies.py::test_a_large_body_is_looked_at_as_a_small_one_whatever_its_keys "
        "openai/test_forms.py::test_ambiguous_forms_are_refused"
    ),
    "responses (`/v1/responses`)": (
        "app/test_tenants_apart.py::test_a_response_is_there_for_its_tenant_alone "
        "app/test_tenants_apart.py::test_no_spelling_of_a_path_or_body_gets_at_a_response "
        "app/test_rights.py::test_the_owner_alone_reaches_a_response_whatever_happens "
        "app/test_rights.py::test_the_engine_that_has_it_is_waited_for "
        "app/test_rights.py::test_a_configured_secret_outlives_new_keys_and_a_restart "
        "replication/test_responses.py::test_a_response_is_found_by_another_replica_for_its_tenant_alone "
        "workers/test_workers.py::test_a_response_is_found_by_the_successor_of_a_worker"
    ),
    "an id chosen by the client": (
        "app/test_tenants_apart.py::test_no_spelling_of_a_path_or_body_gets_at_a_response "
        "app/test_rights.py::test_no_id_that_a_router_did_not_make_is_passed_on"
    ),
    "files, batches, conversations, stored chats": (
        "app/test_tenants_apart.py::test_paths_that_engines_do_not_separate_by_key_are_refused"
    ),
    "keys": "app/test_keys.py::test_engines_get_the_routers_key_and_not_the_clients",
    "caches": "prompts/test_affinity.py::test_form_does_not_matter_but_content_does",
    "requests": (
        "admission/test_tenants.py::test_requests_a_minute_then_429_with_the_time_until_the_next "
        "workers/test_gossip.py::test_limits_of_a_tenant_hold_for_all_workers_together "
        "replication/test_limits.py::test_two_routers_give_one_limit"
    ),
    "prompt tokens": "app/test_keys.py::test_every_api_is_charged_by_what_the_engine_reports_else_by_size",
    "requests that no engine answered": (
        "admission/test_tenants.py::test_unanswered_requests_are_refunded "
        "app/test_keys.py::test_a_refused_request_costs_no_tokens"
    ),
    "concurrency": (
        "admission/test_peers.py::test_no_request_stays_active_and_none_is_forgotten "
        "workers/test_gossip.py::test_the_places_of_a_worker_that_is_gone_are_free_without_a_successor"
    ),
    "its share of busy engines": (
        "admission/queue/test_fair.py::test_requests_that_were_charged_nowhere_give_nothing_back"
    ),
    "`priority` of engines": "app/test_keys.py::test_no_priority_is_above_the_tenants_class",
    "transfer parameters": (
        "proxy/test_screen.py::test_neither_kind_of_transfer_reaches_an_engine "
        "proxy/test_screen.py::test_no_place_and_spelling_leaves_a_field_that_steers_an_engine "
        "proxy/test_screen.py::test_no_size_and_path_lets_guarded_fields_through "
        "proxy/test_headers.py::test_no_field_stands_in_for_one_of_the_body "
        "proxy/test_forms.py::test_forbidden_fields_are_refused_in_forms_too"
    ),
    "adapters": (
        "proxy/test_screen.py::test_an_adapter_is_named_by_those_who_may_use_it "
        "app/test_keys.py::test_a_tenant_reaches_no_adapter_past_its_models"
    ),
    "sessions and conversations in engines": (
        "proxy/test_screen.py::test_names_of_others_objects_are_refused_in_every_place"
    ),
    "another tenant's limits": ("replication/test_limits.py::test_foreign_messages_are_refused_and_counted"),
}


def test_each_line_is_held_by_tests_that_exist() -> None:
    text = (ROOT / "docs/tenants.md").read_text(encoding="utf-8")
    table = text[text.index("| thing | rule |") :].split("\n\n")[0].splitlines()[2:]
    assert [line.split("|")[1].strip() for line in table] == list(HELD_BY)
    for tests in HELD_BY.values():
        for test in tests.split():
            file, _, name = test.partition("::")
            tree = ast.parse((ROOT / "tests/router" / file).read_text(encoding="utf-8"))
            functions = ast.FunctionDef | ast.AsyncFunctionDef
            assert name in {node.name for node in tree.body if isinstance(node, functions)}, test
