"""TorchRL's replay buffer in a Ray actor, made so that collectors and trainers can be given it."""

from __future__ import annotations

from typing import Any

from torchrl.data.replay_buffers.ray_buffer import RayReplayBuffer as _TorchRLBuffer

__all__ = ["RayReplayBuffer"]


class RayReplayBuffer(_TorchRLBuffer):
    """TorchRL's ``RayReplayBuffer``, which pickles: a copy reads and writes the same buffer.

    TorchRL's own fails with "no attribute ``_futures_lock``" when it is handed to a
    ``RayLLMCollector`` or a Ray task, as its GRPO scripts do, since its state is taken for that of
    a local buffer (``torchrl/data/replay_buffers/replay_buffers/base.py``, ``__getstate__``).
    Needed up to TorchRL 0.14.1, the newest release when this was written; not needed from the
    release in which ``pickle.dumps`` of TorchRL's succeeds.

    Whoever made the buffer owns it: only there ``close()`` and ``shutdown()`` end the actor. On a
    copy they let go of it.

    Example:
        >>> buffer = RayReplayBuffer(storage=partial(LazyStackStorage, 512), batch_size=32)
        >>> collector = RayLLMCollector(env, policy=policy, replay_buffer=buffer, ...)

    Args:
        *args: See TorchRL's ``RayReplayBuffer``.
        **kwargs: See there.
    """

    _is_copy = False

    def close(self) -> None:
        """Ends the buffer's actor; on a copy, lets go of it."""
        if not self._is_copy:
            super().close()
        elif self.is_alive:
            del self._rb

    def __reduce__(self) -> tuple[Any, ...]:
        # Whether Ray runs is for each process to know, and TorchRL counts who needs it there.
        state = {name: value for name, value in vars(self).items() if name != "_runtime_lease"}
        return _rebuild, (type(self), {**state, "_is_copy": True})


def _rebuild(kind: type[RayReplayBuffer], state: dict[str, Any]) -> RayReplayBuffer:
    buffer = object.__new__(kind)
    vars(buffer).update(state)
    return buffer
