"""Names of the TensorDict entries that this library's ``vLLMWrapper`` adds to TorchRL's.

Every row of a batch is one response. Versions are int64, ``NO_VERSION`` where no weights sampled
the token; times are float32 seconds, NaN where vLLM did not say.
"""

from __future__ import annotations

NO_VERSION = -1  # on tokens that were not sampled: of prompts, and padding
UNKNOWN_COUNT = -1  # where vLLM gave no count

# int64, of the batch's shape: oldest and newest version that sampled one of the row's tokens.
POLICY_VERSION = "policy_version"
MAX_POLICY_VERSION = "max_policy_version"
# int64: the version that sampled each token, laid out as ("tokens", "response") and "full".
POLICY_VERSIONS = "policy_versions"
RESPONSE_VERSIONS = (POLICY_VERSIONS, "response")
FULL_VERSIONS = (POLICY_VERSIONS, "full")
FINISH_REASON = "finish_reason"  # vLLM's reason why the response ended: "stop", "length" or "abort"
GENERATION = "generation"
NUM_CACHED_TOKENS = (GENERATION, "num_cached_tokens")  # int64: of the prompt, from the prefix cache
QUEUE_TIME = (GENERATION, "queue_time")  # from vLLM's queue to its scheduler's first batch
PREFILL_TIME = (GENERATION, "prefill_time")  # from there to the first token
DECODE_TIME = (GENERATION, "decode_time")  # from there to the last; the pauses of pushes are in it
REPLICA_ID = (GENERATION, "replica_id")  # text: of the replica that answered
UNCORRECTED = (GENERATION, "uncorrected")  # text: what was let through by allow=
# int32 [num_tokens, width], laid out as ("tokens", "response"): ids that could be sampled there,
# the likeliest first, NO_TOKEN behind the last. Where there is none, all of the vocabulary could.
SAMPLING_MASK = ("sampling_mask", "response")
NO_TOKEN = -1
# int16 [num_tokens, layers, experts a token], laid out as ("tokens", "full"), of engines that have
# them: ids of the experts that computed the token, NO_EXPERT on the last one and on padding.
ROUTED_EXPERTS = ("routed_experts", "full")
NO_EXPERT = -1
# With input_mode="history". int64: messages of the prompt, and how many of its tokens are those of
# the turn before, as they were read and sampled; 0 where the prompt was encoded anew. bool: whether
# that was so because the template shows an earlier turn in another way than before.
TURNS = "turns"
NUM_MESSAGES = (TURNS, "num_messages")
KEPT = (TURNS, "kept")
FORKED = (TURNS, "forked")
