"""An optimizer for parameters of few bits, such as those that lie in an engine's memory."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class MasterWeights(torch.optim.Optimizer):
    """Steps copies of parameters in float32, and rounds them into the parameters.

    In bfloat16 most of a learning rate's small steps round to nothing (Micikevicius et al., 2018,
    "Mixed Precision Training", section 3.1, where the copies have this name). Each copy is in the
    state as ``"master"``, so that a saved state is complete.

    Example:
        >>> layer = torch.nn.Linear(2, 1, dtype=torch.bfloat16)
        >>> optimizer = MasterWeights(layer.parameters(), torch.optim.AdamW, lr=1e-6)
        >>> layer(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
        >>> optimizer.step()
        >>> optimizer.state[layer.weight]["master"].dtype
        torch.float32

    Args:
        params: Parameters, or groups of them, as every optimizer takes them.
        optimizer_class: What steps the copies.
        **options: Its options, of groups that do not name their own.
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        super().__init__(params, options)
        groups = [
            {**own, "params": [one.detach().to(torch.float32, copy=True) for one in own["params"]]}
            for own in self.param_groups
        ]
        self._masters = optimizer_class(groups, **options)
        for own, other in self._groups():
            own |= {name: value for name, value in other.items() if name != "params"}

    def _groups(self) -> Iterable[tuple[dict[str, Any], dict[str, Any]]]:
        return zip(self.param_groups, self._masters.param_groups, strict=True)

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        of_groups = (
            zip(own["params"], other["params"], strict=True) for own, other in self._groups()
        )
        return [*itertools.chain.from_iterable(of_groups)]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Takes one step of those with a gradient.

        Args:
            closure: Computes the loss and gradients once more, before the step.

        Returns:
            What ``closure`` returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for own, other in self._groups():  # schedulers change ours
            other |= {name: value for name, value in own.items() if name != "params"}
        stepped = [(one, master) for one, master in self._pairs() if one.grad is not None]
        for one, master in stepped:
            master.grad = one.grad.to(torch.float32)  # pyright: ignore[reportOptionalMemberAccess]
        self._masters.step()
        for one, master in stepped:
            master.grad = None
            one.copy_(master)
            self._show(one, master)
        return loss

    def _show(self, one: torch.Tensor, master: torch.Tensor) -> None:
        """Makes a copy's state, and the copy, that of its parameter."""
        self.state[one] = state = self._masters.state[master]
        state["master"] = master

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a state, and the parameters that its copies round to.

        Args:
            state_dict: What ``state_dict()`` returned, of an optimizer of the same parameters.

        Raises:
            ValueError: It is of other parameters or groups.
        """
        self._masters.load_state_dict(state_dict)  # which would be rounded if loaded here
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own |= {name: copy.copy(value) for name, value in saved.items() if name != "params"}
        for one, master in self._pairs():
            if master in self._masters.state:
                one.copy_(master.copy_(self._masters.state[master]["master"]))
                self._show(one, master)
