"""Keys that the configuration does not have any more, and what happens instead.

A key is removed if an operator has no knowledge to choose its value by (decision 042). The value is a
constant or is derived from another setting. Fields of settings structs that are listed here are
arguments for tests: they keep their default in every router.
"""

from __future__ import annotations

from collections.abc import Mapping

_MEASURED = "placement uses the measured constant {value} (docs/decisions/{page})"
_FEED = "the feed uses {value}, which suits every engine that vLLM's publisher can serve"

REMOVED: Mapping[str, str] = {
    "feeds.heartbeats": "a publisher that sends heartbeats is recognised by its first empty batch",
    "feeds.hold_batches_max": _FEED.format(value="4096 batches, half of vLLM's replay buffer"),
    "feeds.hold_bytes_max": _FEED.format(value="32 MiB"),
    "feeds.hold_s_max": _FEED.format(value="10 s"),
    "feeds.payload_bytes_max": _FEED.format(value="16 MiB"),
    "feeds.receive_queue_max": _FEED.format(value="20,000 messages"),
    "feeds.recent_batches_max": _FEED.format(value="1024 batches"),
    "feeds.replay_backoff_s": _FEED.format(value="0.2 s, doubled each time"),
    "feeds.replay_timeout_s": _FEED.format(value="5 s"),
    "feeds.resync_backoff_s": _FEED.format(value="5 s, doubled each time"),
    "feeds.resync_backoff_s_max": _FEED.format(value="300 s"),
    "feeds.snapshots": "snapshots are always requested; publishers without them answer that they have none",
    "feeds.stale_after_s": _FEED.format(value="5 s"),
    "feeds.tick_s": _FEED.format(value="0.25 s"),
    "fleet.dns.interval_s_max": "a TTL above 30 s counts as 30 s",
    "fleet.dns.interval_s_min": "a TTL below 2 s counts as 2 s",
    "fleet.dns.timeout_s": "a DNS server has 2 s to answer",
    "fleet.file.interval_s": "the file is read every second",
    "fleet.gauge_interval_s": "gauges are read at 0.4 of fleet.poll_interval_s",
    "fleet.kubernetes.credentials_dir": "credentials are read where Kubernetes mounts them; "
    "outside a cluster set fleet.kubernetes.kubeconfig",
    "fleet.kubernetes.deletion_cost_change": "a cost is written if it changed by a quarter",
    "fleet.kubernetes.deletion_cost_interval_s": "costs are compared every 60 s",
    "fleet.kubernetes.watch_s": "a watch lasts 60 s",
    "fleet.poll_down_interval_s": "an engine that is down is polled every 0.5 s, or at half of "
    "fleet.poll_interval_s if that is shorter",
    "fleet.polls_missed_max": "an engine is down after three failed polls in a row",
    "index.block_ttl_s": "keys of blocks live for an hour",
    "index.connect_timeout_s": "a connection to the server has 1 s",
    "index.partitions": "a model has 1 partition on a single server and 16 in a Cluster",
    "index.renew_s": "leases are renewed three times in index.lease_s",
    "index.write_timeout_s": "a write has 2 s",
    "listen.body_bytes_per_s_min": "a request body comes with 4096 bytes per second at least",
    "listen.body_timeout_s": "a request body may pause for 30 s",
    "listen.header_bytes_max": "a request head has 64 KiB at most",
    "listen.header_timeout_s": "a request head has 10 s to arrive",
    "listen.keepalive_timeout_s": "an idle connection is kept for 75 s",
    "listen.stall_timeout_s": "a client that does not read its answer is disconnected after 120 s",
    "admin.requests_per_minute": "each name may make 60 requests per minute",
    "epp.connections_max": "256 connections of gateways are accepted",
    "epp.request_timeout_s": "a gateway may pause for 30 s within a request",
    "pd.lease_margin_s": "a third of pd.lease_s is kept for the decode engine",
    "pd.prefills_max": "two prefill engines are asked for a request at most",
    "policy.beta": _MEASURED.format(value=0.25, page="005-eviction-premium.md"),
    "policy.bounded_load_factor": "the policy `hash` uses 1.25",
    "policy.crowding": "a prefill is priced by what it delays (docs/decisions/050-what-a-prefill-delays.md)",
    "policy.delay": _MEASURED.format(value=0.5, page="050-what-a-prefill-delays.md"),
    "policy.eviction_premium": _MEASURED.format(value=0.75, page="005-eviction-premium.md"),
    "policy.probe_interval_s": "an engine without requests for 30 s gets the next cold prompt",
    "policy.queue_gap_s": "equals may have queues of any length (docs/decisions/051-ties-within-a-step.md)",
    "policy.room_share": _MEASURED.format(value=0.3, page="014-pages-and-recent-work.md"),
    "policy.saving_factor": "a second of queue is worth a second saved (docs/decisions/034-queue-bound.md)",
    "policy.scarcity_premium": _MEASURED.format(value=1.75, page="013-price-of-scarce-pages.md"),
    "policy.sequence_s": _MEASURED.format(value="0.02 s", page="012-price-of-a-sequence.md"),
    "prompts.engine_timeout_s": "a call to an engine or a render server for tokens has 1 s",
    "prompts.hub_bytes_max": "the files of one repository have 256 MiB at most",
    "prompts.prompt_bytes_max": "prompts above 8 MiB are placed by their text",
    "proxy.engine_connections_max": "an engine has 4096 connections at most",
    "proxy.keepalive_s": "an idle connection to an engine is kept for 4 s, less than vLLM's 5 s",
    "proxy.retry_after_s_max": "a Retry-After of an engine counts for 60 s at most",
    "proxy.retry_time_s_max": "no further engine is tried 60 s after the first attempt",
    "queue.credit_s": "a tenant may be ahead by what all engines compute in 2 s",
    "queue.sibling_share": "a prompt goes to an engine that has half of it in flight",
}
"""Key -> what happens now. No value of it would serve a deployment better."""


def refusal(key: str, name: str | None = None) -> str:
    """Return the error for a removed key that is given as ``name``: an environment variable, or the key."""
    return (
        f"{name or key} is not a setting any more: {REMOVED[key]}; leave it out "
        "(docs/decisions/042-settings.md)"
    )
