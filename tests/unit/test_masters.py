"""Copies in float32 of parameters in bfloat16, against the same steps on float32 alone."""

import copy

import pytest
import torch

from torchrl_vllm_sync import MasterWeights
from torchrl_vllm_sync.errors import UnsupportedArgumentError

STEPS = 20


def make(dtype):
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4)).to(dtype)


def gradients(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=generator).to(one.dtype)


def train(model, optimizer, seeds, scheduler=None):
    for seed in seeds:
        gradients(model, seed)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()


@pytest.fixture
def pair():
    """A model in bfloat16, and one in float32 of the same values."""
    model = make(torch.bfloat16)
    return model, copy.deepcopy(model).float()


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_steps_are_those_of_float32(pair, kind):
    model, exact = pair
    groups = [{"params": model[0].parameters(), "lr": 3e-5}, {"params": model[1].parameters()}]
    others = [{"params": exact[0].parameters(), "lr": 3e-5}, {"params": exact[1].parameters()}]
    optimizer, other = MasterWeights(groups, kind, lr=1e-5), kind(others, lr=1e-5)
    lower = (torch.optim.lr_scheduler.StepLR(one, 5, 0.5) for one in (optimizer, other))
    before = [one.detach().clone() for one in exact.parameters()]
    for one, scheduler in zip((optimizer, other), lower, strict=True):
        for seed in range(STEPS):  # of the same gradients
            gradients(model, seed)
            for mine, its in zip(model.parameters(), exact.parameters(), strict=True):
                its.grad = mine.grad.float()
            one.step()
            scheduler.step()
    for mine, its, then in zip(model.parameters(), exact.parameters(), before, strict=True):
        assert not torch.equal(its, then)
        assert torch.equal(mine, its.to(torch.bfloat16))


def test_without_copies_small_steps_are_lost(pair):
    """What the class is for: of steps that bfloat16 rounds away nothing is left."""
    model, exact = pair
    rounded = copy.deepcopy(model)
    for one, optimizer in (
        (model, MasterWeights(model.parameters(), torch.optim.SGD, lr=1e-5)),
        (rounded, torch.optim.SGD(rounded.parameters(), lr=1e-5)),
        (exact, torch.optim.SGD(exact.parameters(), lr=1e-5)),
    ):
        for _ in range(400):
            for parameter in one.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
    moved = [
        sum((a - b.float()).abs().sum() for a, b in zip(exact.parameters(), of, strict=True))
        for of in ([*model.parameters()], [*rounded.parameters()])
    ]
    assert moved[0] < moved[1] / 4


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_saved_state_goes_on_bit_by_bit(pair, kind):
    model, _ = pair
    optimizer = MasterWeights(model.parameters(), kind, lr=1e-5)
    train(model, optimizer, range(5))
    saved = copy.deepcopy(optimizer.state_dict())
    weights = copy.deepcopy(model.state_dict())
    train(model, optimizer, range(5, 10))
    again = make(torch.bfloat16)
    again.load_state_dict(weights)
    other = MasterWeights(again.parameters(), kind, lr=1.0)
    other.load_state_dict(saved)
    assert other.param_groups[0]["lr"] == 1e-5
    train(again, other, range(5, 10))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    states = zip(optimizer.state.values(), other.state.values(), strict=True)
    for one, two in states:
        assert one.keys() == two.keys() >= {"master"}
        assert {value.dtype for value in two.values()} == {torch.float32}
        assert all(torch.equal(one[name], two[name]) for name in one)


def test_copies_follow_what_others_write(pair):
    """A model that is loaded, and a state that is cleared, such as by loading a run's beginning."""
    model, _ = pair
    optimizer, fresh = MasterWeights(model.parameters(), lr=1e-3), make(torch.bfloat16)
    train(model, optimizer, range(3))
    model.load_state_dict(fresh.state_dict())
    optimizer.state.clear()
    other = MasterWeights(fresh.parameters(), lr=1e-3)
    for one, steps in ((model, optimizer), (fresh, other)):
        train(one, steps, range(4, 6))
    for one, two in zip(model.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(one, two)
        assert torch.equal(optimizer.state[one]["master"], other.state[two]["master"])


def test_groups_and_copies_of_it(pair):
    model, _ = pair
    optimizer = MasterWeights(model[0].parameters(), lr=1e-3)
    optimizer.add_param_group({"params": model[1].parameters(), "lr": 1e-2})
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=50)
    again, its = copy.deepcopy((model, optimizer))
    for one, steps in ((model, optimizer), (again, its)):
        train(one, steps, range(3))
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    plain = torch.optim.AdamW(model.parameters())
    gradients(model, 0)
    plain.step()
    with pytest.raises(ValueError, match="must be of a MasterWeights"):
        optimizer.load_state_dict(plain.state_dict())
    with pytest.raises(UnsupportedArgumentError, match="not LBFGS"):
        MasterWeights(model.parameters(), torch.optim.LBFGS)


def test_what_has_no_gradient_stays(pair):
    model, _ = pair
    optimizer = MasterWeights(model.parameters(), lr=0.1)
    before = [one.detach().clone() for one in model.parameters()]
    gradients(model[0], 0)
    loss = optimizer.step(lambda: 7.0)
    assert loss == 7.0
    changed = [not torch.equal(*one) for one in zip(model.parameters(), before, strict=True)]
    assert changed == [True, True, False, False]
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
