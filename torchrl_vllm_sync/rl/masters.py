"""An optimizer for parameters of few bits, such as those that lie in an engine's memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from torchrl_vllm_sync.errors import UnsupportedArgumentError


class MasterWeights(torch.optim.Optimizer):
    """Steps copies of parameters in float32, and rounds them into the parameters.

    In bfloat16 most of a learning rate's small steps round to nothing (Micikevicius et al., 2018,
    "Mixed Precision Training", section 3.1, where the copies have this name). Each copy is in the
    state as ``"master"``, so that a saved state is complete. Where somebody else has changed a
    parameter, such as by loading a model, its copy follows.

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

    Raises:
        UnsupportedArgumentError: ``optimizer_class`` evaluates the loss several times a step.
    """

    _masters: Any = None  # steps the copies; not yet there while groups are added at first

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.AdamW,
        **options: Any,
    ) -> None:
        if issubclass(optimizer_class, torch.optim.LBFGS):
            raise UnsupportedArgumentError("optimizer_class must take a gradient a step, not LBFGS")
        super().__init__(params, options)
        self._masters = optimizer_class([*map(_in_float32, self.param_groups)], **options)
        self.defaults = self._masters.defaults
        for own, other in self._groups():
            own |= _options(other)

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_masters": self._masters}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds parameters, with copies of their own.

        Args:
            param_group: As every optimizer takes it.
        """
        super().add_param_group(param_group)
        if self._masters is not None:
            own = self.param_groups[-1]
            self._masters.add_param_group(_in_float32(own))
            own |= _options(self._masters.param_groups[-1])

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
            other |= _options(own)
        stepped = [(one, master) for one, master in self._pairs() if one.grad is not None]
        for one, master in stepped:
            if one not in self.state:  # it may have been cleared
                self._masters.state.pop(master, None)
            is_same = (master.to(one.dtype) == one).all()  # of which the host need not know
            master.copy_(torch.where(is_same, master, one.to(torch.float32)))
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
            ValueError: It is of other parameters or groups, or not of this class.
        """
        if not all("master" in one for one in state_dict["state"].values()):
            raise ValueError("state_dict must be of a MasterWeights: it holds no copies in float32")
        self._masters.load_state_dict(state_dict)  # which would be rounded if loaded here
        for own, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own |= _options(saved)
        self.state.clear()
        for one, master in self._pairs():
            if master in self._masters.state:
                one.copy_(master.copy_(self._masters.state[master]["master"]))
                self._show(one, master)


def _in_float32(group: dict[str, Any]) -> dict[str, Any]:
    copies = [one.detach().to(torch.float32, copy=True) for one in group["params"]]
    return {**group, "params": copies}


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}
