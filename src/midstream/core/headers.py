"""Names of headers: those between gateways and replicas, and those that clients send.

Always holds: a gateway drops any of the former that a client sends. docs/security.md says who may set them.
"""

from __future__ import annotations

#: Internal request headers, set by the gateway (it drops any a client sends) and read by replicas.
# The session key, percent-encoded. A request without it has no session.
HEADER_SESSION = "x-midstream-session"
# The secret between a gateway and its replicas, when they have one.
HEADER_TOKEN = "x-midstream-token"
# The owner of the API key. Without it there is a single tenant.
HEADER_TENANT = "x-midstream-tenant"
# What the API key may do. Only the control app gets it.
HEADER_SCOPES = "x-midstream-scopes"
# The policy that the request is for. Without it, it is for the deployment's own.
HEADER_POLICY = "x-midstream-policy"
# The boot that the request was placed on. Another boot may serve other weights, and refuses it.
HEADER_BOOT = "x-midstream-boot"
# Stamp of a session that begins, or begins again, on this replica.
HEADER_PLACED = "x-midstream-placed"
# JSON of a price.Moved: the session that begins here lived on another replica before.
HEADER_MOVED = "x-midstream-moved"
# The replica hands this request to no other one.
HEADER_STAY = "x-midstream-stay"

# The control app answers it to the data path: the name of what it made, for the audit log.
HEADER_MADE = "x-midstream-made"

# Clients send them: the deployment that is meant, and its model. A response names the deployment.
HEADER_DEPLOYMENT = "fireworks-deployment"
HEADER_MODEL = "fireworks-model"
# Clients send it: a signal's files replace what the identity meant.
HEADER_OVERWRITE = "x-midstream-overwrite"
# Clients send it: what follows when a chat template rewrites an earlier answer. exact (the default): its sampled tokens stay;
# template: it is rendered again.
HEADER_HISTORY = "x-midstream-history"
# Clients send it: what a session's trace keeps of each sampled token: none, logprobs, routes or masks. A session that is named
# by a path keeps routes if nothing else is said.
HEADER_RECORDS = "x-midstream-records"
#: "ignore": body fields that no wire knows are passed over, as the deployment's setting says. Else they are refused.
HEADER_UNKNOWN_FIELDS = "x-midstream-unknown-fields"
#: Of a response: the fields that were passed over, percent-encoded, separated by commas.
HEADER_IGNORED_FIELDS = "x-midstream-ignored-fields"
# Clients send it: a new session begins where its prompt is known.
HEADER_FOLLOW_PREFIX = "x-midstream-follow-prefix"
# Clients send it: tokens that the session is expected to come to, prompts and answers together.
HEADER_EXPECTED_TOKENS = "x-midstream-expected-tokens"
EXPECTED_TOKENS_MAX = 2**31
#: Of a response whose session waited for room in the KV cache: its place in the queue when it came, and for how long.
HEADER_QUEUE_POSITION = "x-midstream-queue-position"
HEADER_QUEUE_WAIT = "x-midstream-queue-wait-ms"
