"""Choices that real routers made (``benchmarks.routing_peers --golden``), replayed here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import routing_peers
from benchmarks.peers import regimes
from benchmarks.peers.checks import NUM_REPLICAS, PEERS, checks, description
from benchmarks.peers.script import BLOCK_SIZE, End, EndSession, Script, Send, Wait, decide
from benchmarks.routing_sim.policies.torchrl_rule import TorchRLRule

DATA = Path(__file__).parent / "data" / "routing_peers"


def _cases():
    for path in sorted(DATA.glob("*.json")):
        golden = json.loads(path.read_text())
        for case in golden["cases"]:
            name = f"{golden['peer']} {golden['version']}, {case['regime']}"
            yield pytest.param(golden["peer"], case, id=name)


CASES = list(_cases())


def agreement(peer, case, *, steps=None, **settings):
    script = Script.from_json(case["steps"])
    if steps is not None:
        script = Script.from_json([step for step in case["steps"] if steps(step)])
    policy = description(peer, case["settings"] | settings, case["addresses"])
    choices = decide(script, policy, real=case["choices"])
    assert len(choices) == len(case["choices"])
    same = sum(one == other for one, other in zip(choices, case["choices"], strict=True))
    return same / len(choices), policy.ties.followed


@pytest.mark.parametrize(
    ("entry", "message"),
    [("sglang", "--python must be PEER=PATH, got sglang"), ("a=b", "unknown peers: a")],
)
def test_the_command_refuses_interpreters_of_nobody(entry, message, capsys):
    with pytest.raises(SystemExit):
        routing_peers.main(["--smoke", "--python", entry])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("peer", "case"), CASES)
def test_the_description_chooses_as_the_real_router_did(peer, case):
    share, drawn = agreement(peer, case)
    assert share == 1
    assert drawn < 0.7 * len(case["choices"])


def test_every_real_router_is_there():
    assert {param.values[0] for param in CASES} == set(PEERS)
    assert sum(path.stat().st_size for path in DATA.glob("*.json")) < 200_000


def _find(peer, regime):
    return next(
        p.values[1] for p in CASES if p.values[0] == peer and p.values[1]["regime"] == regime
    )


@pytest.mark.parametrize(
    ("peer", "regime", "settings"),
    [
        ("sglang-router", "evictions", {"eviction_interval_secs": 0}),
        ("sglang-router", "evictions", {"max_tree_size": 90}),
        ("sglang-router", "crowding on one prefix", {"balance_abs_threshold": 63}),
        ("sglang-router", "crowding on one prefix", {"balance_abs_threshold": 65}),
        ("sglang-router", "branching prompts, tuned", {"balance_abs_threshold": 64}),
        ("ray", "crowding on one prefix, tuned", {"imbalanced_threshold": 6}),
        ("ray", "crowding on one prefix", {"match_rate_threshold": 0.3}),
        ("ray", "evictions", {"eviction_threshold": None}),
        ("ray", "evictions", {"eviction_target": 50}),
        (
            "ai-dynamo-runtime",
            "branching prompts, prompts computed at once",
            {"prefill_at_once": False},
        ),
        (
            "ai-dynamo-runtime",
            "conversations, prompts never computed",
            {"prefill_at_once": True},
        ),
    ],
)
def test_other_settings_choose_otherwise(peer, regime, settings):
    assert agreement(peer, _find(peer, regime), **settings)[0] < 1


@pytest.mark.parametrize("peer", ["smg", "vllm-router"])
def test_other_addresses_choose_otherwise(peer):
    case = _find(peer, "conversations")
    assert agreement(peer, case | {"addresses": case["addresses"][::-1]})[0] < 1


def test_sessions_that_nobody_ends_choose_otherwise():
    case = _find("vllm-router", "conversations")
    assert agreement("vllm-router", case, steps=lambda step: step[0] != "x")[0] < 1


def test_requests_that_never_end_choose_otherwise():
    case = _find("verl", "conversations")
    assert agreement("verl", case, steps=lambda step: step[0] != "e")[0] < 1


def test_another_prefix_length_chooses_otherwise(monkeypatch):
    case = _find("torchrl", "branching prompts")
    monkeypatch.setattr(
        "benchmarks.peers.checks.TorchRLRule",
        lambda cluster, seed: TorchRLRule(cluster, seed, prefix_length=7),
    )
    assert agreement("torchrl", case)[0] < 1


def test_scripts_survive_being_written_down():
    for check in checks(60):
        again = Script.from_json(json.loads(json.dumps(check.script.to_json())))
        assert again.steps == check.script.steps
        assert again.prompts == check.script.prompts


def test_a_script_shares_blocks_and_no_more():
    script = Script()
    script.add(Send(-1, 0, 3))
    script.add(Send(0, 2, 2))
    assert script.prompts == [[0, 1, 2], [0, 1, 3, 4]]
    assert script.text(1)[:2] == script.text(0)[:2]
    assert len(set(script.text(0) + script.text(1))) == 5
    assert script.tokens(1).tolist() == [t + 1 for t in (0, 1, 3, 4) for _ in range(BLOCK_SIZE)]
    assert script.text(0, words=True)[: 56 * 2] == script.text(1, words=True)[: 56 * 2]
    with pytest.raises(ValueError, match="fewer than 4 blocks"):
        script.add(Send(0, 4, 1))


@pytest.mark.parametrize(
    "script",
    [
        regimes.conversations(1, num_sends=80, concurrent=10),
        regimes.groups(1, num_sends=80),
        regimes.strangers(1, num_sends=80, in_flight=30),
        regimes.mixed(1, num_sends=80, in_flight=20),
        regimes.phases(1, num_phases=4, sends=20, wait_s=1),
        regimes.leaving(1, sends=40, replicas=3),
    ],
    ids=["conversations", "groups", "strangers", "mixed", "phases", "leaving"],
)
def test_regimes_send_what_they_say_and_end_nothing_twice(script):
    sent, ended = 0, set()
    for step in script.steps:
        if isinstance(step, Send):
            sent += 1
        elif isinstance(step, End):
            assert 0 <= step.request < sent
            assert step.request not in ended
            ended.add(step.request)
        else:
            assert isinstance(step, Wait | EndSession) or step.replica < NUM_REPLICAS
    assert sent == 80
    assert all(script.prompts)


def test_a_disagreement_is_counted(monkeypatch):
    check = next(one for one in checks(60) if one.peer == "torchrl")
    right = decide(check.script, description("torchrl", {}))
    wrong = [(right[0] + 1) % NUM_REPLICAS, *right[1:]]
    for choices, exact, expected in ((right, True, 0), (wrong, True, 1), (wrong, False, 0)):
        recorder = routing_peers.Recorder("routing_peers", [])
        monkeypatch.setattr(
            routing_peers, "real_choices", lambda *_, choices=choices: (choices, [], [1e-6])
        )
        found = routing_peers.run(recorder, replace(check, exact=exact), Path(), "0")
        assert found == expected
        assert recorder.records[0]["samples"] == [1.0 if choices is right else 59 / 60]


def test_a_real_router_that_is_missing_is_skipped_and_named(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(routing_peers, "installed_version", lambda peer, python: None)
    assert routing_peers.main(["--smoke", "--out", str(tmp_path), "--peers", "smg"]) == 1
    printed = capsys.readouterr().out
    assert "smg: smg cannot be imported" in printed
    assert "no real router" in printed
    assert not list(tmp_path.iterdir())
