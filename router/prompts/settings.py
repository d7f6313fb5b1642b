"""Settings and counters of the prompt reader: ``ModelPrompts`` for each model, ``PromptSettings`` for all."""

from __future__ import annotations

from datetime import UTC, datetime, tzinfo
from typing import Annotated, Any, Literal
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import msgspec

from kvatlas.router.openai.apis import PROMPT_APIS

# Name for every base model without an entry of its own.
ANY_MODEL = "*"
# Of one repository's tokenizer, templates and configuration.
HUB_BYTES_MAX = 256 << 20


class ModelPrompts(msgspec.Struct, frozen=True):
    """How one model's prompts are made; must match the flags of its engines.

    ``tokenizer_dir``: a Hugging Face model directory; None: ask the engine. ``chat_template``: the engine's
    ``--chat-template`` (file or text). ``time_zone``: the engines', None: as here. ``lora_paths``: adapter
    name -> path exactly as given to the engines, since block hashes cover it.
    """

    tokenizer_dir: str | None = None
    chat_template: str | None = None
    chat_template_content_format: Literal["auto", "string", "openai"] = "auto"
    default_chat_template_kwargs: dict[str, Any] = {}
    exclude_tools_when_tool_choice_none: bool = False
    anthropic_disabled_thinking_effort: str = "auto"
    max_model_len: int | None = None
    time_zone: str | None = None
    lora_paths: dict[str, str] = {}


class PromptSettings(msgspec.Struct, frozen=True):
    """Bounds of prompt processing. Sizes of caches are estimates of resident memory."""

    prefix_cache_bytes_max: int = 256 << 20
    """Cache of tokens and block hashes of earlier prompts, shared by all models. Several workers have one
    each, and together as much again, where they find each other's. Raise it if
    `kvatlas_prompts_prefix_evictions_total` grows and memory is free."""
    fast_tokenizer: Literal["auto", "off"] = "auto"
    """``auto``: tokenize with fastokens if it gives the tokens of ``tokenizers`` for all probe texts, and
    compare again on a running sample; ``off``: always ``tokenizers``. `off` if the router crashes in this
    library."""
    # Not a key of the configuration: config/removed.py.
    prompt_bytes_max: int = 8 << 20
    """Larger bodies are placed by text affinity, without tokens (the default is about 2 million tokens of
    English). Long prompts are decoded, tokenized and hashed in worker threads."""
    worker_threads: int = 2
    """Threads for tokenizing and hashing. Raise it with free cores, if `kvatlas_prompts_worker_full_total`
    grows."""
    hub_downloads: bool = True
    """Whether tokenizers that are known by name are fetched from the model hub: only the files needed for
    rendering, never weights or code. ``false``: only its cache on this machine and directories. Switch it off
    where the router must not reach the internet."""
    hub_endpoint: str = ""
    """A mirror of the hub, e.g. ``https://hub.example.com``; else ``HF_ENDPOINT``, else huggingface.co. Set
    it if the hub is reachable through a mirror only."""
    hub_timeout_s: float = 120.0
    """Time-out of fetching them, in seconds; engines are asked for tokens meanwhile. Raise it on a slow link,
    if `/ready` reports `too_slow`."""
    renderers: tuple[str, ...] = ()
    """Render servers (``vllm launch render``), each ``http://host:port``: asked before any engine for prompts
    that are not tokenized here. They need the engines' model and options. Set it for prompts with images, and
    for models whose chats the router cannot render."""
    # Not a key of the configuration: config/removed.py.
    engine_timeout_s: float = 1.0
    """Time-out of one call to an engine's or a render server's endpoint, in seconds."""


def local_time(time_zone: str | None) -> datetime:
    """The current local time of an engine with this time zone (naive); None: of this machine."""
    zone = None if time_zone is None else zone_of(time_zone)
    return datetime.now(zone).replace(tzinfo=None)


def zone_of(name: str) -> tzinfo:
    """Return an IANA time zone. Raises ``ValueError`` for an unknown name."""
    if name == "UTC":
        return UTC  # without the system's data
    try:
        return ZoneInfo(name)
    except (OSError, ValueError, ZoneInfoNotFoundError):
        raise ValueError("no time zone of this name is known here") from None


# Why a tokenizer cannot be used.
FAILURES = (
    # The repository wants an accepted licence and a token.
    "gated",
    # No such repository or revision, or one that is private.
    "not_found",
    # The hub refuses further requests for now.
    "rate_limited",
    # The hub does not answer, or answers with an error.
    "unreachable",
    # Downloads are switched off and the cache has nothing.
    "offline",
    # A file came shorter than announced.
    "incomplete",
    "disk",  # the cache cannot be written
    # More bytes than HUB_BYTES_MAX.
    "too_large",
    "too_slow",  # longer than prompts.hub_timeout_s
    # The repository or directory has no tokenizer of a supported kind.
    "no_tokenizer",
    # Its tokenizer is Python code, which is never executed.
    "remote_code",
    # Its files cannot be read, or need a package.
    "unusable",
    # The engine names a path of its own machine.
    "not_readable",
    # The engine gives other tokens for the same prompts.
    "differs",
    "not_compared",  # no engine reports its tokens
)
WAYS = ("local", "renderer", "engine", "affinity")
# Why a prompt is not computed locally, and (if no engine helped) placed by affinity.
REASONS = (
    "model_unknown",  # no configuration names this model
    # Hashes cover the adapter's path, which is unknown.
    "lora_path_unknown",
    "no_tokenizer",  # no local tokenizer configured
    # Not a text-generation endpoint this reader knows.
    "endpoint",
    # The engine renders this model's chats with code, not with a template.
    "renderer",
    # vLLM's Rust frontend makes other tokens of it, which are not reproduced.
    "frontend",
    # chat, but the tokenizer directory has no chat template.
    "no_template",
    "template_rejected",  # the chat template raised an error
    "tokenizer_class",  # engines make another tokenizer of the model's files
    # The request brings its own chat template.
    "request_template",
    # chat_template_kwargs reach past the template.
    "template_kwargs",
    "multimodal",  # images, audio, video
    "embeds",  # prompt embeddings
    # A message part whose rendering is not reproduced.
    "message_shape",
    # A tool whose rendering is not reproduced.
    "tools_shape",
    # Truncation that depends on what is not known here.
    "truncation",
    # Another field of a type or use that is not reproduced.
    "field",
    # JSON that only some parsers accept.
    "unusual_json",
    "too_large",  # over prompt_bytes_max
    # More lists, objects or messages than can be decoded without holding the event loop.
    "too_complex",
    "busy",  # the worker queue is full
    "empty",  # a prompt without tokens
    # It continues a response that one engine holds.
    "earlier_response",
)


class PromptStats(msgspec.Struct):
    """Counts since start; ``*_bytes`` are gauges. Invariant: every request read is counted once, in
    ``local``, ``renderer``, ``engine`` or ``affinity[reason]``; a refused one (an ``ApiError``) in
    ``refused``.
    """

    local: Annotated[int, "kvatlas_prompts_local_total"] = 0
    """Prompts tokenized by the router itself."""
    engine: Annotated[int, "kvatlas_prompts_engine_total"] = 0
    """Prompts tokenized by asking an engine."""
    renderer: Annotated[int, "kvatlas_prompts_renderer_total"] = 0
    """Prompts tokenized by asking a render server."""
    refused: Annotated[int, "kvatlas_prompts_refused_total"] = 0
    """Requests refused while their prompt was read: no engine would accept them either."""
    not_local: Annotated[dict[str, int], "kvatlas_prompts_not_local_total{reason}"] = msgspec.field(
        default_factory=lambda: dict.fromkeys(REASONS, 0)
    )
    """Prompts that the router could not tokenize itself, by reason."""
    affinity: Annotated[dict[str, int], "kvatlas_prompts_affinity_total{reason}"] = msgspec.field(
        default_factory=lambda: dict.fromkeys(REASONS, 0)
    )
    """Requests placed by their text because their tokens are unknown, by reason."""
    reads: Annotated[dict[tuple[str, str], int], "kvatlas_prompts_reads_total{api,how}"] = msgspec.field(
        default_factory=lambda: {(api, how): 0 for api in PROMPT_APIS.values() for how in WAYS}
    )
    """Requests by API and by how the prompt was read: ``local``, ``renderer``, ``engine``, ``affinity``."""
    multi_prompt: Annotated[int, "kvatlas_prompts_multi_prompt_total"] = 0
    """Requests with several prompts; routed by the first."""

    tokenizers_found: Annotated[int, "kvatlas_prompts_tokenizers_found_total"] = 0
    """Tokenizers named by engines or the configuration that were found or fetched, compared, and taken into
    use."""
    tokenizer_failures: Annotated[dict[str, int], "kvatlas_prompts_tokenizer_failures_total{reason}"] = (
        msgspec.field(default_factory=lambda: dict.fromkeys(FAILURES, 0))
    )
    """Tokenizers that could not be fetched, read or used, by reason; engines are asked meanwhile."""

    rendered: Annotated[int, "kvatlas_prompts_rendered_total"] = 0
    """Chats rendered to text, by a template or from cached parts."""
    rendered_jinja2: Annotated[int, "kvatlas_prompts_rendered_jinja2_total"] = 0
    """Renderings by jinja2, the slower engine, because minijinja is not used for that template or text."""
    template_checks: Annotated[int, "kvatlas_prompts_template_checks_total"] = 0
    """Renderings compared with jinja2's."""
    template_mismatches: Annotated[int, "kvatlas_prompts_template_mismatches_total"] = 0
    """Texts that differed from jinja2's, which was used instead. The other renderer is not used for chats of
    that kind any more."""
    template_shapes_forgotten: Annotated[int, "kvatlas_prompts_template_shapes_forgotten_total"] = 0
    """Kinds of chats that minijinja renders differently, evicted for lack of room and detected again
    later."""
    templates_distrusted: Annotated[int, "kvatlas_prompts_templates_distrusted_total"] = 0
    """Templates rendered only by jinja2 from then on: minijinja gave another text for a kind of chat for
    which it had given the same."""

    prefix_hits: Annotated[int, "kvatlas_prompts_prefix_hits_total"] = 0
    """Prompts that began like one in the prefix cache, whose tokens and hashes were reused."""
    prefix_misses: Annotated[int, "kvatlas_prompts_prefix_misses_total"] = 0
    """Prompts that began like none in the prefix cache."""
    prefix_evictions: Annotated[int, "kvatlas_prompts_prefix_evictions_total"] = 0
    """Entries evicted from the prefix cache."""
    prefix_bytes: Annotated[int, "kvatlas_prompts_prefix_bytes"] = 0
    """Size of the prefix cache."""
    shared_hits: Annotated[int, "kvatlas_prompts_shared_hits_total"] = 0
    """Prompts whose beginning another worker had read, or an earlier process of this one: tokens and hashes
    were taken from the memory that workers share."""
    shared_misses: Annotated[int, "kvatlas_prompts_shared_misses_total"] = 0
    """Prompts whose beginning was looked up in that memory and was not there."""
    shared_written: Annotated[int, "kvatlas_prompts_shared_written_total"] = 0
    """Prompts written to that memory."""
    shared_overwritten: Annotated[int, "kvatlas_prompts_shared_overwritten_total"] = 0
    """Prompts overwritten there by newer ones of the same worker."""
    shared_torn: Annotated[int, "kvatlas_prompts_shared_torn_total"] = 0
    """Prompts that were overwritten while they were read, or never written completely: not used."""
    shared_refused: Annotated[int, "kvatlas_prompts_shared_refused_total"] = 0
    """Prompts too large for that memory."""
    shared_entries: Annotated[int, "kvatlas_prompts_shared_entries"] = 0
    """Prompts in that memory."""
    shared_bytes: Annotated[int, "kvatlas_prompts_shared_bytes"] = 0
    """Their size."""
    context_bytes: Annotated[int, "kvatlas_prompts_context_bytes"] = 0
    """Size of the cache of tool lists and other template input."""
    context_evictions: Annotated[int, "kvatlas_prompts_context_evictions_total"] = 0
    """Entries evicted from that cache."""
    media_hits: Annotated[int, "kvatlas_prompts_media_hits_total"] = 0
    """Prompts with images that were all seen before: no call was needed for their tokens."""
    media_misses: Annotated[int, "kvatlas_prompts_media_misses_total"] = 0
    """Prompts with images for which a render server or an engine had to be asked."""
    media_bytes: Annotated[int, "kvatlas_prompts_media_bytes"] = 0
    """Size of the cache of images."""
    media_evictions: Annotated[int, "kvatlas_prompts_media_evictions_total"] = 0
    """Sets of images evicted."""
    media_checks: Annotated[int, "kvatlas_prompts_media_checks_total"] = 0
    """Prompts with known images that were asked for comparison."""
    media_mismatches: Annotated[int, "kvatlas_prompts_media_mismatches_total"] = 0
    """Prompts with images for which the answer differed; that model's are always asked for from then on."""
    oversized: Annotated[int, "kvatlas_prompts_oversized_total"] = 0
    """Prompts, texts and tool lists too large for their cache: used once."""
    tokens_reused: Annotated[int, "kvatlas_prompts_tokens_reused_total"] = 0
    """Prompt tokens taken from the prefix cache."""
    tokens_new: Annotated[int, "kvatlas_prompts_tokens_new_total"] = 0
    """Prompt tokens made by the tokenizer."""
    tokens_fast: Annotated[int, "kvatlas_prompts_tokens_fast_total"] = 0
    """Tokens made by fastokens; the rest of the new ones by ``tokenizers``."""
    tokenizer_checks: Annotated[int, "kvatlas_prompts_tokenizer_checks_total"] = 0
    """Texts tokenized by both libraries for comparison."""
    tokenizer_mismatches: Annotated[int, "kvatlas_prompts_tokenizer_mismatches_total"] = 0
    """Texts with different results; that model uses ``tokenizers`` from then on."""
    blocks_reused: Annotated[int, "kvatlas_prompts_blocks_reused_total"] = 0
    """Block hashes taken from the prefix cache."""
    blocks_hashed: Annotated[int, "kvatlas_prompts_blocks_hashed_total"] = 0
    """Block hashes computed."""

    worker_jobs: Annotated[int, "kvatlas_prompts_worker_jobs_total"] = 0
    """Prompts tokenized in a worker thread because they are long."""
    worker_full: Annotated[int, "kvatlas_prompts_worker_full_total"] = 0
    """Prompts that went to affinity because the worker queue was full."""

    renderer_calls: Annotated[int, "kvatlas_prompts_renderer_calls_total"] = 0
    """Calls to render servers for the tokens of a prompt."""
    renderer_failures: Annotated[int, "kvatlas_prompts_renderer_failures_total"] = 0
    """Such calls without an answer that can be used."""
    renderer_skipped: Annotated[int, "kvatlas_prompts_renderer_skipped_total"] = 0
    """Calls to render servers not made: the server is failing, or too many calls at once."""
    engine_calls: Annotated[int, "kvatlas_prompts_engine_calls_total"] = 0
    """Calls to engines for the tokens of a prompt."""
    engine_failures: Annotated[int, "kvatlas_prompts_engine_failures_total"] = 0
    """Such calls without an answer that can be used."""
    engine_skipped: Annotated[int, "kvatlas_prompts_engine_skipped_total"] = 0
    """Engine calls not made: endpoint known to be absent or failing, or too many calls at once."""

    def count_read(self, path: str, how: str) -> None:
        """Count a request's prompt."""
        api = PROMPT_APIS.get(path)
        if api is not None:
            self.reads[api, how] += 1
