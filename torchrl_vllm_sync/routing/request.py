"""What routing may know of a request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torchrl_vllm_sync.routing.blocks import BYTES_PER_TOKEN

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torchrl_vllm_sync.routing.blocks import PromptChain
    from torchrl_vllm_sync.routing.prefix_index import PrefixIndex

__all__ = ["RoutingRequest"]


@dataclass(slots=True)
class RoutingRequest:
    """What a strategy may know of a request.

    Attributes:
        prompt: Text, or token ids, not empty; None if the caller did not say.
        context: What else the caller said; this library's strategies do not read it.
        session_id: The conversation it belongs to; None if the caller did not say.
        group_id: The group of requests with the same prompt it belongs to, likewise.
        salt: Requests with different salts share no cache; vLLM's ``cache_salt``.
        num_samples: Samples that it asks for; each counts as one request in flight.
        max_tokens: Most tokens that each sample can have; None if the caller did not say.
        num_coming: Samples that are being placed together and are not counted in any snapshot yet,
            those of this request included.
        known_chain: The prompt's digests, if a strategy has asked for them.
    """

    prompt: str | Sequence[int] | None = None
    context: Mapping[str, Any] | None = None
    session_id: str | int | None = None
    group_id: str | int | None = None
    salt: str | None = None
    num_samples: int = 1
    max_tokens: int | None = None
    num_coming: int = 1
    known_chain: PromptChain | None = field(default=None, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt as far as is known, 0 without one, a guess for text."""
        prompt = self.prompt
        if prompt is None:
            return 0
        return len(prompt) // BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt)

    def chain(self, index: PrefixIndex) -> PromptChain:
        """Returns the prompt's digests in an index's blocks, computed once. There must be a prompt.

        Args:
            index: What the replicas' caches hold.

        Raises:
            InvalidPromptError: An id is not an integer of 32 bits.
        """
        if self.known_chain is None:
            assert self.prompt is not None, "a request without a prompt has no digests"
            self.known_chain = index.chain(self.prompt, self.salt)
        return self.known_chain
