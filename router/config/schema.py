"""The router's configuration: one frozen tree that contains all defaults.

The docstrings of the fields are the users' reference (docs/configuration.md).
"""

from __future__ import annotations

import ipaddress
from typing import Any, Literal

import msgspec

from kvatlas.router.admission.admission_queue import QueueSettings
from kvatlas.router.admission.key_file import KeySettings
from kvatlas.router.api.admin_auth import AdminSettings
from kvatlas.router.feeds.base import FeedSettings
from kvatlas.router.feeds.store_settings import StoreSettings
from kvatlas.router.fleet.engines import EngineAddress
from kvatlas.router.fleet.settings import FleetSettings
from kvatlas.router.http.settings import CorsSettings, ListenSettings
from kvatlas.router.http.tls import TlsFiles, check_tls_files
from kvatlas.router.index.learn.layout import ModelFacts
from kvatlas.router.observe.traces import TraceSettings
from kvatlas.router.observe.usage import UsageSettings
from kvatlas.router.pd.settings import PdSettings
from kvatlas.router.placement.candidate import PolicySettings, PullSettings
from kvatlas.router.placement.shadow import PoolEvidence, ShadowSettings, ShadowSpec, estimated_spec
from kvatlas.router.prompts.settings import ANY_MODEL, ModelPrompts, PromptSettings
from kvatlas.router.prompts.tokenizer_source import AUTO, parse_source
from kvatlas.router.proxy.settings import ProxySettings
from kvatlas.router.replication.settings import IndexSettings
from kvatlas.router.services.epp.settings import EppSettings

# Every worker receives every request event of the others.
WORKERS_MAX = 32
# Default of ``epp.listen`` for `kvatlas epp`: the port of other endpoint pickers.
EPP_LISTEN = "0.0.0.0:9002"
# Default of ``server.ops_port``.
OPS_PORT = 9001


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One served model: how its prompts become tokens, and facts about its KV cache that no event carries.

    Facts that a model needs: [README](../README.md#with-vllm); reasons: [exactness.md](exactness.md).
    """

    tokenizer: str = AUTO
    """``auto``: the `root` that the engines' `/v1/models` reports: a directory that is readable here, or a
    repository of the hub, whose tokenizer is downloaded. Or a directory with `tokenizer.json` (Hugging Face
    layout), a repository `ORG/NAME[@REVISION]`, or ``off``: the engines tokenize each prompt, which engines
    with ``--tokenizer-mode cohere`` need. All are compared with the engines' own tokens: one found by
    ``auto`` before it is used; a configured one that differs stays in use, and the log, `/ready` and the
    doctor report it. Set it if `/ready` reports that the tokenizer was not found, or to start without a
    network."""
    chat_template: str | None = None
    """Chat template as a file or as text; set it if the engines were started with ``--chat-template``."""
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    """The engines' ``--chat-template-content-format``. Set it as the engines were started."""
    default_chat_template_kwargs: dict[str, Any] = {}
    """The engines' ``--default-chat-template-kwargs``. Set it as the engines were started."""
    exclude_tools_when_tool_choice_none: bool = False
    """Whether the engines were started with ``--exclude-tools-when-tool-choice-none``. Set it as the engines
    were started."""
    anthropic_disabled_thinking_effort: Literal["auto", "none", "low", "medium", "high", "xhigh", "max"] = (
        "auto"
    )
    """The engines' ``--anthropic-disabled-thinking-effort``: how they handle ``thinking: {"type":
    "disabled"}`` on ``/v1/messages``. Set it as the engines were started."""
    time_zone: str | None = None
    """The engines' time zone (``UTC``, ``Europe/Berlin``), for models whose prompts contain the date, which
    engines take from their local time. Not set: the router's own. Set it if router and engines run in
    different zones."""
    lora_paths: dict[str, str] = {}
    """Adapter name -> the path it was loaded from, which enters the block hashes. Adapters not listed here
    use the path that the engine's ``/v1/models`` reports. Set it if `explain` says that an adapter's path is
    unknown."""
    attention_chunk_size: int | None = None
    """Chunk of chunked local attention in tokens, for models that have it (e.g. Llama 4). Not set: taken from
    the model's `config.json` beside the tokenizer; required if that is missing."""
    attention_chunk_sizes: dict[str, int] = {}
    """Group number -> chunk of chunked local attention in tokens, where the groups' chunks differ. Set it if
    `explain` asks for it."""
    mamba_cache_mode: Literal["align", "all"] | None = None
    """The engines' Mamba cache mode, ``align`` or ``all``, for models with Mamba layers. Not set: taken from
    the engine's metrics or `/server_info`. Set it if `explain` asks for it."""
    eagle_groups: tuple[int, ...] | Literal["all"] | None = None
    """Numbers of the KV cache groups whose lookup drops the last block, in vLLM before 0.33, and in later
    versions with a KV connector or ``disable_lookahead_block_hashes``: ``all`` for EAGLE, EAGLE3 and DFlash,
    where vLLM marks all groups; for MTP the group of the last layer. Not set: detected from the engine's own
    statements, the model's `config.json` and receipts ([exactness.md](exactness.md#settings)). Set it if
    receipts are a block too long with a drafter."""
    eagle_groups_apart: bool = False
    """Set if the layers of ``eagle_groups`` have other heads than the model's own layers of the same kind,
    window and block size: vLLM then looks up their groups separately, which no event shows."""
    partial_hash_hits: bool | None = None
    """Whether a hit may end inside a block. Not set: derived from the groups as vLLM does. Set it only if
    receipts differ by less than a block."""
    report_mode_full: bool = False
    """Set if clients send ``kv_cache_report_mode=full``: repeated store events are then not counted as new
    copies. Predictions are less exact with it; preferably keep clients from sending the field
    (``proxy.kv_cache_report_mode``)."""
    retention_interval: int | Literal["dense"] | None = None
    """The engines' ``--prefix-cache-retention-interval`` in tokens, or ``dense``. Not set: taken from the
    engine's metrics or `/server_info`, else 0, vLLM's default since 0.29. Set it for the Rust frontend, which
    does not report it."""
    hash_seeds: tuple[str, ...] = ()
    """Values of the engines' PYTHONHASHSEED; tried first when the hash scheme is detected. Needed for
    seeds that are not numbers from 0 to 1023, 1234, 12345 or 123456."""
    kinds: dict[str, str] = {}
    """Group number -> kind of attention, for vLLM 0.20 and 0.21, whose events lack it. Not set: taken from
    the layers in the model's `config.json` if these form as many groups as the events show; otherwise full
    attention."""
    windows: dict[str, int] = {}
    """Group number -> sliding window in tokens, for vLLM 0.20 and 0.21, whose events lack it. Not set: as
    with ``kinds``."""
    shared_stores: tuple[str, ...] = ()
    """Stores that every engine of the model loads from, by the ``ownership`` field of KV events. An engine
    that writes to a store is known to load from it without this. Set it if some engines only read from the
    store."""
    shared_store_ttl_s: float = 1800.0
    """How long a block is considered present after it was reported as written to a shared store (stores do
    not report evictions). A block may be dropped after half of this time. Set it to the age at which the
    store evicts."""
    replay_tokens: int = 0
    """Sliding window in tokens of layers with bounded replay (DeepSeek V4.1 with ``swa_bounded_replay``):
    this many tokens of a hit are recomputed, and a shorter hit does not count. 0: no such layers. Set it to
    the window of such a model."""
    first_connector_loads: bool = False
    """Set if the engines combine connectors with vLLM's MultiConnector: the first connector that has
    anything loads. Unset, the connector with the most tokens loads, as in ``HybridMultiConnector``."""
    blocks_per_chunk: int | None = None
    """Blocks that vLLM's OffloadingConnector keeps under one hash (its option `blocks_per_chunk`, or
    `block_size` in tokens divided by the block size). Not set: taken from `/server_info`, or from events with
    `self_describing_kv_events`; else 1. Set it if hits from host memory are predicted too low."""
    shadow: ShadowSettings = ShadowSettings()
    """Block pool of engines without events. Set it if predictions for such engines are wrong."""

    def facts(self) -> ModelFacts:
        """Return the facts that the index needs."""
        numbered = ("attention_chunk_sizes", "kinds", "windows")
        return ModelFacts(
            **_common(self, ModelFacts)
            | {name: {int(idx): fact for idx, fact in getattr(self, name).items()} for name in numbered}
        )

    def prompts(self) -> ModelPrompts:
        """Return the settings of the prompt reader; without a directory that has yet to be found."""
        source = parse_source(self.tokenizer)
        directory = source.name if source.kind == "directory" else None
        return ModelPrompts(tokenizer_dir=directory, **_common(self, ModelPrompts))

    def shadow_spec(self) -> ShadowSpec:
        """Return the pool assumed for engines of this model that state nothing of theirs. Raises
        ``ValueError``."""
        return estimated_spec(self.shadow, PoolEvidence(facts=self.facts()))


def _common(settings: msgspec.Struct, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the settings that are fields of ``kind`` too."""
    names = set(settings.__struct_fields__).intersection(kind.__struct_fields__)
    return {name: getattr(settings, name) for name in names}


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Addresses on which the router listens, and logging."""

    host: str = "127.0.0.1"
    """Address to listen on; `0.0.0.0` for all addresses of the machine. Set `0.0.0.0` in a container and
    behind a load balancer on another machine."""
    port: int = 8000
    """TCP port to listen on; 0 takes a free one, which is logged. It serves `/v1/*`, `/health`, `/ready` and
    `/version`. Change it if another program has the port."""
    workers: int | Literal["auto"] = 1
    """Processes that share the port, up to 32; `auto`: one per core that this process may use. Limits of
    memory and connections apply to each of them ([scale.md](scale.md#workers)). Linux only. Raise it if a
    core is busy with one worker (`process_cpu_seconds_total`)."""
    ops_host: str = "127.0.0.1"
    """Address of the ops port: `/metrics` and `/kvatlas/*`, which contain data of all clients. On a loopback
    address every process of this machine has access; any other address needs tokens, or `ops_open`. Change it
    for a Prometheus on another machine."""
    ops_names: tuple[str, ...] = ()
    """Host names, without a port, that clients of the ops port may use if it needs no token, e.g. that of a
    Service. IP addresses, `localhost`, the machine's own name and `ops_host` are always allowed; requests
    under any other name get 421, since DNS rebinding can make a browser send them. Set it if clients get
    421."""
    ops_port: int | Literal["off", "public"] | None = None
    """TCP port of `/metrics` and `/kvatlas/*`. Not set: 9001, or a free one if `port` is 0. 0 takes a free
    one, `off` disables it, `public` serves them to everyone on the router's own port."""
    ops_token_file: str | None = None
    """File with tokens for the ops port (`Authorization: Bearer`), in the format of `admin.token_file`; that
    file is used if this is not set and `ops_host` is not a loopback address. Set it when `ops_host` is open
    to other machines."""
    ops_open: bool = False
    """Serve the ops port to everyone who reaches it, on any address; only behind a firewall. Set it instead
    of a token."""
    tls_cert_file: str | None = None
    """Certificate chain of `port`, PEM: clients then use HTTPS. Reloaded when it changes, like its key. Set
    it where nothing in front of the router ends TLS."""
    tls_key_file: str | None = None
    """Private key of that certificate, PEM. Set it with `tls_cert_file`."""
    client_ca_file: str | None = None
    """Certificate authority of clients, PEM: each client must present a certificate it signed (mTLS). Set it
    if only clients with certificates may connect."""
    expose_decision: bool = False
    """Add `x-kvatlas-engine`, `x-kvatlas-hit-tokens`, `x-kvatlas-predicted-ttft-ms` and `server-timing`
    (predicted and measured parts of the time to first token) to every response. Switch it on while testing;
    clients then see names of engines."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is logged: `debug`, `info`, `warning` or `error`. Lower it while searching a
    fault."""
    log_format: Literal["console", "json"] = "console"
    """`console` for people, `json` for log collectors (one object per line). Set it as your collector reads
    it."""
    log_requests: bool = False
    """Log one line `request` per proxied request at level info: method, path, model, engine, status, bytes,
    times, tokens, request id. Never any text of a prompt or an answer. Switch it on if no proxy in front
    writes an access log."""
    check_every: int = 0
    """Self-check: recount the index, the load accounts and the prompts in flight after this many decisions,
    and log an error for each contradiction. 0: never. One check blocks everything else for about 0.1 s per
    million blocks. Set it to 1000 while searching a wrong prediction or account."""

    def __post_init__(self) -> None:
        check_tls_files(self.tls_cert_file, self.tls_key_file, self.client_ca_file)
        if self.check_every < 0:
            raise ValueError(f"check_every must be 0 or more, got {self.check_every}")

    @property
    def tls(self) -> TlsFiles:
        """TLS settings of the public port; without any, it uses plain HTTP."""
        return TlsFiles(self.tls_cert_file, self.tls_key_file, self.client_ca_file)

    @property
    def ops_listens_on(self) -> int | None:
        """Return the port number of the ops listener (0: a free one); None without such a listener."""
        if self.ops_port is None:
            return OPS_PORT if self.port else 0
        return self.ops_port if isinstance(self.ops_port, int) else None


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of ``kvatlas serve``."""

    server: ServerConfig = ServerConfig()
    engines: tuple[EngineAddress, ...] = ()
    stores: tuple[StoreSettings, ...] = ()
    models: dict[str, ModelConfig] = {}
    """By served model name; ``*`` is for any model not named."""
    aliases: dict[str, str | dict[str, float]] = {}
    """Name that clients may use for a model -> the served model, or several with their shares of requests.
    Requests of one session ([tenants.md](tenants.md#sessions)) go to the same one."""
    fleet: FleetSettings = FleetSettings()
    policy: PolicySettings = PolicySettings()
    proxy: ProxySettings = ProxySettings()
    listen: ListenSettings = ListenSettings()
    cors: CorsSettings = CorsSettings()
    feeds: FeedSettings = FeedSettings()
    prompts: PromptSettings = PromptSettings()
    index: IndexSettings = IndexSettings()
    admin: AdminSettings = AdminSettings()
    epp: EppSettings = EppSettings()
    keys: KeySettings = KeySettings()
    queue: QueueSettings = QueueSettings()
    pd: PdSettings = PdSettings()
    pull: PullSettings = PullSettings()
    traces: TraceSettings = TraceSettings()
    usage: UsageSettings = UsageSettings()

    def model(self, name: str) -> ModelConfig:
        return self.models.get(name) or self.models.get(ANY_MODEL) or ModelConfig()

    def adapters(self) -> dict[str, dict[str, str]]:
        """Return LoRA paths by configured model; always includes ``*``."""
        return {name: self.model(name).lora_paths for name in (*self.models, ANY_MODEL)}

    def alias_shares(self) -> dict[str, dict[str, float]]:
        return {n: {to: 1.0} if isinstance(to, str) else to for n, to in self.aliases.items()}

    @property
    def ops_tokens(self) -> tuple[str, str] | None:
        """Return setting and path of the ops port's token file; None if it needs no token."""
        server = self.server
        if server.ops_listens_on is None or server.ops_open:
            return None
        if server.ops_token_file is not None:
            return "server.ops_token_file", server.ops_token_file
        if is_loopback(server.ops_host) or self.admin.token_file is None:
            return None
        return "admin.token_file", self.admin.token_file


def is_loopback(host: str) -> bool:
    """Whether a port on this address is unreachable from other machines."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
