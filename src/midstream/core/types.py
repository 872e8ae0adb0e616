"""The vocabulary every part of midstream shares. No I/O, no torch.

The unit is the token record: a token, two log-probabilities, a snapshot and an MoE route. The token was sampled from the
snapshot's logits, and the forward pass that produced it took that route. Streams, plain responses, metrics and tests are
views of token records.

Always holds:
- A record describes ONE forward pass: `logprob`, `snapshot` and `route` belong to the pass that scored the token with its
  logits. For the token at position i its input position was i-1. The pass that later consumes the token is another one.
- A snapshot is named by its identity everywhere. `BASE_SNAPSHOT` names the weights the server started with.
"""

from __future__ import annotations

import enum
from typing import Annotated, Literal

import msgspec

from midstream.core.kv import KvStats

BASE_SNAPSHOT = "base"

#: abort: a trainer's call ended the choice. dead_end: its grammar and the limits of the request together allow no token.
FinishReason = Literal["stop", "length", "tool_calls", "abort", "dead_end"]
ResetPromptCache = Literal["all", "new_session", "none"]
TransitionType = Literal["ASYNC", "SYNC"]
ArcFormat = Literal["arc_v1", "arc_v2"]
#: Deltas as trainers write them themselves (snapshots/trainer_deltas).
TrainerFormat = Literal["miles_delta", "skyrl_delta"]
CompressionFormat = ArcFormat | TrainerFormat


class TopLogprob(msgspec.Struct, array_like=True, frozen=True):
    token_id: int
    # Of the raw model, in nats.
    logprob: float


#: Choices that a record may call near ties; a record's `near_tie` has bit i for the i-th. native/sample.h has the same bits.
NEAR_TIES = ("router", "top_k", "top_p", "min_p", "greedy")
NEAR_ROUTER, NEAR_TOP_K, NEAR_TOP_P, NEAR_MIN_P, NEAR_GREEDY = (1 << i for i in range(len(NEAR_TIES)))


#: What responses and traces say of the logprob of a record that is `constrained`, as `logprob_of`.
ALLOWED = "allowed"


class TokenRecord(msgspec.Struct, array_like=True, frozen=True):
    """One token and the forward pass that produced (generated) or scored (prompt) it.

    logprob: log p of the raw model, natural log, before temperature and filters. 0.0 for the first prompt token,
        which nothing scores.
    sampling_logprob: log p under the distribution actually sampled from (temperature, top-p, top-k, penalties);
        None on prompt tokens; NaN where the engine does not know it.
    route: bytes of a C-order [moe_layers, top_k] array, uint8 (little-endian uint16 above 256 experts).
        None when not asked for, on a dense model, and on the first prompt token.
    near_tie: bits of NEAR_TIES: choices of that pass that another rounding of the same numbers may make differently. A
        prompt token has no other than "router". A bit is 0 also where the engine does not know it.
    rank: the token's place among all by its logit, from 1. 0 where it is not known: only prompt tokens that were
        asked for with alternatives have it.
    constrained: logprob is not the raw model's, but that of the tokens that the grammar of the answer allowed.
    mask: the tokens that limits and filters left for the draw, in the form of core/masks.py. sampling_logprob is normalised
        over them. None when not asked for, and on prompt tokens.
    router_weights: bytes of a C-order [moe_layers, top_k] array, little-endian float32: what the output of each expert of
        `route` was multiplied by. None when not asked for, on a dense model, and on the first prompt token.
    """

    token_id: int
    logprob: float
    sampling_logprob: float | None
    snapshot: str
    route: bytes | None = None
    top_logprobs: tuple[TopLogprob, ...] = ()
    near_tie: int = 0
    rank: int = 0
    constrained: bool = False
    mask: bytes | None = None
    router_weights: bytes | None = None


class ShapedSampling(msgspec.Struct, frozen=True, kw_only=True):
    """What makes the distributions that tokens are drawn from out of the model's logits. temperature 0 is greedy; top_k <= 0
    and top_p >= 1 and min_p <= 0 switch those filters off."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    # Before so many tokens are generated, none of stop_token_ids is.
    min_tokens: int = 0
    # Generation ends after one of these tokens. The token is part of the records.
    stop_token_ids: tuple[int, ...] = ()
    # Only these tokens may be generated, and those that end generation only if they are among them. (): all may.
    allowed_token_ids: tuple[int, ...] = ()
    # Token sequences that must not be generated; and their texts, for engines that tokenize.
    bad_tokens: tuple[tuple[int, ...], ...] = ()
    bad_words: tuple[str, ...] = ()


class SamplingParams(ShapedSampling, frozen=True, kw_only=True):
    """How to sample."""

    max_tokens: int
    # Choice i of a request samples with stream (seed, i, position).
    seed: int = 0

    @property
    def limited(self) -> bool:
        """Whether min_tokens, allowed_token_ids or bad words forbid tokens."""
        return bool(self.min_tokens or self.allowed_token_ids or self.bad_words or self.bad_tokens)


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request to an engine: token ids in, token records out.

    salt: namespace of the prefix cache (tenant, isolation key and prompt-cache namespace, mixed by the replica). KV is
        shared only between requests of equal salt. Its first half is the same in all namespaces of one owner.
    prompt_records: how many of the last prompt tokens to return records for (echo); 0 = none.
    want_kv_snapshots: report which snapshots computed the KV (GenerationEvent.kv_snapshots).
    grammar: what the generated text must match, in llguidance's Lark dialect or JSON; None: anything. Only for an engine
        with ModelInfo.grammars true. replica/text/grammar.py has checked it: one that does not compile is an error event.
    want_logprobs: False: they are not needed; an engine may leave `logprob` at 0.0 and alternatives out.
    reproducible: False: the client chose no seed; an engine may draw in any way.
    urgent: goes before requests that wait, and beside as many as run already.
    priority: of requests that wait, the one with the lower number goes first; of equal ones, the first that came.
    kv_age_max: cached KV may have been computed at most so many commits ago (0: under what serves now); None: any age.
    policy: the one to sample from; "" is the deployment's own. snapshot: a resident one of it; None: what the policy serves,
        also after its next switch.
    session: names the session among all of this engine; "": it has none. returns_s: from the end of this turn until the next
        one, as is likely. kept_s: after so long it is overdue. An engine with the feature `session_kv` evicts KV by that.
    emitted: of each choice, the tokens that another engine generated already: it continues after them as if it had made them
        itself. None: this choice is over, nothing of it is computed. (): every choice begins at its beginning.
    """

    request_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    salt: bytes = b""
    want_routes: bool = False
    want_masks: bool = False
    want_router_weights: bool = False
    top_logprobs: int = 0
    prompt_records: int = 0
    want_kv_snapshots: bool = False
    grammar: str | None = None
    kv_age_max: int | None = None
    emitted: tuple[tuple[int, ...] | None, ...] = ()
    want_logprobs: bool = True
    reproducible: bool = True
    urgent: bool = False
    priority: int = 0
    policy: str = ""
    snapshot: str | None = None
    session: str = ""
    returns_s: float = 0.0
    kept_s: float = 0.0

    @property
    def choices(self) -> tuple[int, ...]:
        """The choices that are to be generated."""
        if not self.emitted:
            return tuple(range(self.n))
        return tuple(i for i in range(self.n) if self.emitted[i] is not None)

    def emitted_of(self, choice: int) -> tuple[int, ...]:
        return (self.emitted[choice] or ()) if self.emitted else ()


class GenerationEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an engine reports for one choice after a step.

    `finish` is set on the last event of the choice and only there. `error` ends the whole request: a message for the user; no
    further event follows. The first event of a choice carries three more fields.

    cached_tokens: prompt tokens with reused KV.
    queued_s: seconds until the choice was given a place in a step.
    prompt: under echo, records of the last `prompt_records` prompt tokens.
    kv_snapshots: when asked for, which snapshot computed the KV of each position so far. Its (snapshot, start, end) spans go
        over prompt and generated tokens from position 0, end exclusive. It comes with the first event, with the last one,
        and after a change that is more than growth of the last span (a swap, a recomputation). The token reported last has
        no KV yet. Commits of one snapshot are one span.
    kv_files: with kv_snapshots, what the files of the last span's snapshot are (Slot.announce); "": not known.
    renamed: (name, label) of snapshots that have other weights by now: earlier spans under the name mean the label.
    """

    index: int = 0
    tokens: tuple[TokenRecord, ...] = ()
    prompt: tuple[TokenRecord, ...] | None = None
    cached_tokens: int | None = None
    queued_s: float | None = None
    finish: FinishReason | None = None
    error: str | None = None
    kv_snapshots: tuple[tuple[str, int, int], ...] | None = None
    kv_files: str = ""
    renamed: tuple[tuple[str, str], ...] = ()


#: A number that a process reports of itself, as ledgers and metrics take it.
Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]


class Stage(enum.StrEnum):
    """Where a replica stands with a snapshot. The legal moves are the table in replica/swap/table.py."""

    # The replica serves and has nothing to do.
    IDLE = "idle"
    FETCHING = "fetching"
    # An incremental snapshot: parent and delta become whole files.
    REBUILDING = "rebuilding"
    VERIFYING = "verifying"
    STAGING = "staging"
    # Verified and in memory. The next step boundary may switch to it.
    STAGED = "staged"
    COMMITTING = "committing"
    # The snapshot serves already. What the engine holds is proved before it is called ready.
    CHECKING = "checking"
    # The target failed before its commit. The old snapshot serves.
    ERROR = "error"


class FileContent(msgspec.Struct, array_like=True, frozen=True):
    """One file of a snapshot. digest: of its bytes (snapshots/content.py says how it is made)."""

    name: str
    # Bytes.
    size: int
    digest: str


#: All files of one snapshot's own directory, by name: what its identity means.
Content = tuple[FileContent, ...]


class SnapshotFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of one snapshot in its bucket.

    url: the directory they lie in. fingerprint: of the files as they were when the snapshot was signalled; other files under
    this name are another snapshot. None: unknown. compression: None when they are whole, else how they differ from the
    parent's. content: what the ledger says the files are, byte for byte; other bytes are refused. None: not known yet.

    A fingerprint is of what the bucket lists: names, sizes and entity tags. Files that were signalled before a bucket had them
    have one of their content (`content:` and a SHA-256, snapshots/content.py). They are the same files wherever they lie.
    """

    snapshot: str
    url: str
    fingerprint: str | None = None
    compression: CompressionFormat | None = None
    content: Content | None = None


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica should serve; the gateway sends it, the replica converges on it.

    generation: grows with every effective signal of the deployment, so that a snapshot that failed can be asked for again.
    signalled: generation of the last signal that asked for this snapshot; lower than `generation` for a fallback.
    reset_prompt_cache: the strongest policy of the signals behind that of what served when this was sent, `reset_since`. A
        replica that serves an older signal's snapshot when it switches resets all.
    url: where the snapshot's own files lie (one directory), e.g. file:///bucket/step-12. None for BASE_SNAPSHOT.
    fingerprint, compression, content: of the own files, as in SnapshotFiles. A new generation of the identity that serves is
        a new load if the fingerprint, or a content that is known of both, is another.
    parents: for an incremental snapshot, the chain it stands on: the full snapshot first, its direct parent last.
    max_cache_age: of cached KV that may be reused while this snapshot serves, in commits; None: no limit.
    ignore_config: top-level fields of config.json that may differ from the served model's.
    hold: prepare up to STAGED and wait for the same (snapshot, generation) without hold.
    policy: the one to load; "" is the deployment's own.
    made: when the policy was made, 0 if that is not said. One of the same name that is made later is another.
    let_go: generation of an older target; if that is what is staged and held still, it may switch now. 0: none.
    reload: grows when the replica is to load again what it serves already.
    seen: the generation in the report that the sender judged by. A lower generation than the accepted one counts only where the
        sender has seen that; otherwise it was sent before, and came late. None: the sender does not say.
    stands_on: of a policy, the signal of full weights that was the deployment's newest when this was signalled. An engine that
        has no other base for it (feature `policy_base`) loads it once it serves that signal's snapshot, or a newer one's.
    ends_before: of full weights: policies that stand on an older signal than this have been ended, and see nothing of them.
    peers: addresses of other replicas of the deployment, which may have pushed files that the bucket does not have. The last
        message counts, also for a fetch that has begun.
    """

    snapshot: str
    generation: int
    signalled: int = 0
    url: str | None = None
    reset_prompt_cache: ResetPromptCache = "all"
    reset_since: int = 0
    transition: TransitionType = "ASYNC"
    fingerprint: str | None = None
    compression: CompressionFormat | None = None
    content: Content | None = None
    parents: tuple[SnapshotFiles, ...] = ()
    max_cache_age: int | None = None
    ignore_config: tuple[str, ...] = ()
    hold: bool = False
    let_go: int = 0
    reload: int = 0
    policy: str = ""
    made: float = 0.0
    seen: int | None = None
    stands_on: int = 0
    ends_before: int = 0
    peers: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[SnapshotFiles, ...]:
        """The whole chain, the full snapshot first and this one last; empty for BASE_SNAPSHOT."""
        if self.url is None:
            return ()
        own = SnapshotFiles(
            snapshot=self.snapshot,
            url=self.url,
            fingerprint=self.fingerprint,
            compression=self.compression,
            content=self.content,
        )
        return (*self.parents, own)


PauseMode = Literal["abort", "wait", "keep"]
#: What becomes of a deployment's policies when it gets full weights: they stand on the weights of the start, or go on with the
#: new ones, or are ended; or the weights are refused while there are any.
PolicyFate = Literal["keep", "rebase", "end", "refuse"]


class Pause(msgspec.Struct, frozen=True):
    """Whether a deployment generates. mode: what becomes of the requests that run (docs/trainer-calls.md); None: it generates.

    serial: grows with every pause and resumption of the deployment, so that an older message undoes no newer one.
    """

    serial: int = 0
    mode: PauseMode | None = None


class Hint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Files of a snapshot that lie in the bucket before it is signalled. url: the directory they lie in; files: their names.
    policy: as in Desired."""

    snapshot: str
    url: str
    files: tuple[str, ...]
    policy: str = ""


class SnapshotContent(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica found a snapshot's own files to be, under the fingerprint that it was given."""

    snapshot: str
    fingerprint: str | None
    files: Content


class SnapshotCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a replica found after it switched to a snapshot. Replicas that serve the same files must agree.

    weights: `KIND:DIGEST` of the weights as the engine holds them; None when it cannot read them. Comparable between equal
        kinds only: the kind is made of what decides how an engine holds weights.
    unread: weights are still to come.
    canary: raw log-probabilities, nats, of a fixed prompt's tokens from the second on.
    """

    snapshot: str
    generation: Whole
    weights: str | None = None
    canary: tuple[float, ...] = ()
    unread: bool = False


class Transition(msgspec.Struct, frozen=True, kw_only=True):
    """One stage change of one replica: what the ledger keeps. `seq` counts from 0 within a boot of the replica."""

    seq: Whole
    # Seconds since the epoch.
    at: float
    snapshot: str
    generation: Whole
    stage: Stage
    # The error message when stage is ERROR.
    detail: str = ""


class SwapTiming(msgspec.Struct, frozen=True, kw_only=True):
    """How long the last completed swap took, in milliseconds.

    pause_ms: from the end of the last step before the switch until the switch, when sequences were running.
    generation: of the target that it was for.
    same_weights_as: the snapshot that served before, if its check found exactly the same weights; else empty.
    """

    snapshot: str
    generation: Whole = 0
    fetch_ms: float = 0.0
    rebuild_ms: float = 0.0
    verify_ms: float = 0.0
    stage_ms: float = 0.0
    pause_ms: float = 0.0
    check_ms: float = 0.0
    # Sequences that were running at the switch.
    streams_crossed: int = 0
    same_weights_as: str = ""


class EngineStats(msgspec.Struct, frozen=True, kw_only=True):
    """Counters and gauges of an engine; counters only grow within a boot."""

    running: Whole = 0
    waiting: Whole = 0
    kv: KvStats = KvStats()
    prompt_tokens: Whole = 0
    cached_prompt_tokens: Whole = 0
    generated_tokens: Whole = 0
    steps: Whole = 0


#: What a request or a signal may need of an engine, with a description. An EngineCard says which of these its engine has.
ENGINE_FEATURES: dict[str, str] = {
    "routes": "the MoE route of each token (include_routing_matrix)",
    "router_weights": "what the output of each expert of a route is multiplied by (return_router_weights)",
    "prompt_logprobs": "log-probabilities of prompt tokens (echo with logprobs)",
    "cached_prompt_logprobs": "prompts reuse cached KV also when their log-probabilities are asked for",
    "grammars": "answers that match a JSON schema, and forced tool calls",
    "sampling_logprobs": "sampling_logprob under every temperature and filter, not only where it follows from logprob",
    "sampling_masks": "the tokens that limits and filters left for each draw (return_sampling_mask)",
    "near_ties": "near_tie in token records: draws that another rounding may make differently",
    "router_ties": "near_tie names choices of routers, too",
    "constrained_logprobs": "logprob of an answer that must match a grammar is the raw model's",
    "logit_bias": "logit_bias and penalties",
    "token_limits": "allowed_token_ids, bad_words and min_tokens",
    "priorities": "an order of waiting requests (priority)",
    "cache_policies": "reset_prompt_cache all, new_session and none, without reuse beyond what they say",
    "max_cache_age": 'reset_prompt_cache {"max_age": k}',
    "session_kv": "KV of sessions between two turns is kept for as long as the next one is likely",
    "kv_travel": "KV of a session that moves is copied to its new home where that is cheaper than to compute it",
    "kv_provenance": "which snapshots computed cached KV, token by token",
    "resume": "continuing a stream of a lost replica",
    "reproducible_sampling": "equal seeds give equal tokens, whatever else runs and also after a failover",
    "weights_digest": "a digest of the weights as the engine holds them, compared between replicas",
    "freeze": "requests that stand still in a pause and continue with their KV (mode keep)",
    "frozen_check": "a snapshot that comes in such a pause is proved in the pause, not after it",
    "full_snapshots": "snapshots of full weights, loaded while streams run",
    "policies": "LoRA adapters, many at once, each a policy of its own",
    "policy_base": "policies keep the weights of the start as their base, whatever full weights serve",
    "policy_crossing": "streams that cross a swap of their policy and continue with the new adapter",
    "resident_snapshots": "snapshots that have served stay loaded, for requests that ask for them",
    "audit": "a share of finished turns is computed again while the replica is idle (records.audit_share)",
    "short_swap": "a pause that does not grow with the model at a swap",
}


class EngineCard(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine is and can do. kind: as in the setting `engine`; features: names from ENGINE_FEATURES, in its order.

    why: of some features that it lacks, the reason in this engine's settings. weight_transfer: the backend of vLLM by which its
    workers take weights from trainers; "": a receiver beside the engine does. ranks: that take part in a trainer's group.
    """

    kind: str = "embedded"
    # Version of the engine's own software. "" means unknown.
    version: str = ""
    features: tuple[str, ...] = tuple(ENGINE_FEATURES)
    why: dict[str, str] = {}
    weight_transfer: str = ""
    ranks: int = 1

    def has(self, feature: str) -> bool:
        return feature in self.features


#: Policies that a replica holds at once, unless its settings say otherwise.
POLICIES_MAX = 256


class PolicyEnd(msgspec.Struct, frozen=True, kw_only=True):
    """The gateway's word to a replica that a policy is ended: the one of this name that was made then."""

    policy: str
    made: float = 0.0


ENGINE_SILENT_FROM_S = 5
# (tenant, key): equal keys of two tenants are different sessions. "": the only tenant.
Session = tuple[str, str]


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What an engine serves. moe_layers and top_k are 0 on a dense model. grammars: GenerateRequest.grammar is honoured.
    card: what the engine is and can do."""

    max_model_len: int
    vocab_size: int
    moe_layers: int = 0
    top_k: int = 0
    num_experts: int = 0
    eos_token_ids: tuple[int, ...] = ()
    grammars: bool = False
    card: EngineCard = EngineCard()
