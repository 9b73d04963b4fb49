"""Names of the TensorDict entries that this library's ``vLLMWrapper`` adds to TorchRL's.

Every row of a batch is one response. Versions are int64, ``NO_VERSION`` where no weights sampled
the token; times are float32 seconds, NaN where vLLM did not say.
"""

from __future__ import annotations

# Stands in the place of a version on tokens that were not sampled: of prompts, and padding.
NO_VERSION = -1
# Stands in the place of a count that vLLM did not give.
UNKNOWN_COUNT = -1

# int64, of the batch's shape: the oldest version that sampled one of the row's tokens.
POLICY_VERSION = "policy_version"
# int64, of the batch's shape: the newest one.
MAX_POLICY_VERSION = "max_policy_version"
POLICY_VERSIONS = "policy_versions"
# int64, laid out as ("tokens", "response"): the version that sampled each token.
RESPONSE_VERSIONS = (POLICY_VERSIONS, "response")
# int64, laid out as ("tokens", "full"): the same, with NO_VERSION on the prompt.
FULL_VERSIONS = (POLICY_VERSIONS, "full")
# Text: vLLM's reason why the response ended: "stop", "length" or "abort".
FINISH_REASON = "finish_reason"
GENERATION = "generation"
# int64, of the batch's shape: tokens of the prompt that came from the prefix cache.
NUM_CACHED_TOKENS = (GENERATION, "num_cached_tokens")
# float32 seconds: from vLLM's queue to its scheduler's first batch.
QUEUE_TIME = (GENERATION, "queue_time")
# float32 seconds: from there to the first token.
PREFILL_TIME = (GENERATION, "prefill_time")
# float32 seconds: from the first token to the last; the pauses of pushes are in it.
DECODE_TIME = (GENERATION, "decode_time")
# Text: id of the replica that answered.
REPLICA_ID = (GENERATION, "replica_id")
