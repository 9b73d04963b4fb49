"""Whether the routers described for the simulation choose as the real ones do.

Real routers and their descriptions run the same scripts of requests (``benchmarks/peers``), and
their choices are compared one by one: all must agree but in the checks that are not ``exact``
(``benchmarks/peers/checks.py``), or the exit status is 1. Where a rule draws lots, the description
follows the real router as long as its choice is among the equals; that many were ``drawn``. In
cases of words, prompts part in the middle of blocks; there disagreements are also counted with the
description put right after each (``in step``).

sglang-router, smg and vllm-router run as programs in front of stub workers; Ray's router, TorchRL's
balancer, Dynamo's selection core and verl's balancer run in process, where their decisions are
timed as well (the median is printed), without the calls to actors that Ray and TorchRL make.

None of them but TorchRL is among this project's requirements. A real router that is not installed
is skipped, and said to be; ``--python sglang-router=/path/to/python`` names an interpreter that has
one. ``--golden DIRECTORY`` writes short scripts with the real choices, which a unit test replays.

``python -m benchmarks.routing_peers`` takes five minutes with all of them, ``--smoke`` seconds.
"""

from __future__ import annotations

import argparse
import json
import logging
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.peers.checks import NUM_REPLICAS, PEERS, Check, checks, description
from benchmarks.peers.http_router import choices_over_http
from benchmarks.peers.script import decide
from benchmarks.peers.wheels import SGLANG_ROUTER, SMG, VLLM_ROUTER
from benchmarks.record import ROOT, Recorder

if TYPE_CHECKING:
    from benchmarks.peers.script import FollowedTies

PROGRAMS = {kind.name: kind for kind in (SGLANG_ROUTER, SMG, VLLM_ROUTER)}
START_S = 120
RUN_S = 600


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison and writes the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sends", type=int, default=1000, help="requests of a comparison")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PEER=PATH", help="who has which peer"
    )
    parser.add_argument("--peers", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--golden", type=Path, help="directory for short scripts with choices")
    parser.add_argument("--out", type=Path, help="directory of the record")
    parser.add_argument("--smoke", action="store_true", help="seconds, meaning nothing")
    args = parser.parse_args(argv)
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)  # routers probe for gRPC
    if unclear := [entry for entry in args.python if "=" not in entry]:
        parser.error(f"--python must be PEER=PATH, got {unclear[0]}")
    pythons = dict(entry.split("=", 1) for entry in args.python)
    if unknown := set(pythons) - set(PEERS):
        parser.error(f"unknown peers: {', '.join(sorted(unknown))}")
    recorder = Recorder("routing_peers")
    recorder.check(smoke=args.smoke)
    disagreeing = 0
    for peer in args.peers:
        python = Path(pythons.get(peer, sys.executable))
        version = installed_version(peer, python)
        if version is None:
            print(f"{peer}: {PEERS[peer]} cannot be imported by {python}, skipped")
            continue
        for check in checks(60 if args.smoke else args.sends):
            if check.peer != peer:
                continue
            disagreeing += run(recorder, check, python, version)
        if args.golden is not None:
            short = [one for one in checks(120) if one.peer == peer and one.golden]
            cases = [golden_case(check, python) for check in short]
            write_golden(args.golden / f"{peer}.json", peer, version, cases)
    if not recorder.records:
        print("no real router to compare with")
        return 1
    print(recorder.write(smoke=args.smoke, directory=args.out))
    return 1 if disagreeing else 0


def run(recorder: Recorder, check: Check, python: Path, version: str) -> int:
    """Makes one comparison; returns 1 if it disagrees where it must not."""
    choices, addresses, seconds = real_choices(check, python)
    policy = description(check.peer, check.settings, addresses)
    described = decide(check.script, policy, real=choices)
    ties: FollowedTies = policy.ties  # pyright: ignore[reportAssignmentType]  decide put it there
    agreeing = [one == other for one, other in zip(choices, described, strict=True)]
    share = sum(agreeing) / len(agreeing)
    more = {"decisions": len(agreeing), "drawn": ties.followed, "version": version}
    more |= {"settings": check.settings}
    recorder.add(
        case=check.regime,
        system=check.peer,
        metric="decisions_agreeing",
        unit="fraction",
        samples=[share],
        **more,
    )
    line = f"{check.peer} {version}, {check.regime}: {share:.4f} of {len(agreeing)} agree"
    line += f", {ties.followed} drawn" if ties.followed else ""
    if check.words:
        policy = description(check.peer, check.settings, addresses)
        described = decide(check.script, policy, real=choices, in_step=True)
        agreeing = [one == other for one, other in zip(choices, described, strict=True)]
        recorder.add(
            case=check.regime,
            system=check.peer,
            metric="decisions_agreeing_in_step",
            unit="fraction",
            samples=[sum(agreeing) / len(agreeing)],
            **more,
        )
        line += f", {sum(agreeing) / len(agreeing):.4f} in step"
    if seconds:
        for metric, percent in (("decision_p50", 50), ("decision_p99", 99)):
            recorder.add(
                case=check.regime,
                system=check.peer,
                metric=metric,
                unit="µs",
                samples=[float(np.percentile(seconds, percent)) * 1e6],
                version=version,
            )
        line += f", {np.median(seconds) * 1e6:.1f} µs"
    wrong = check.exact and share < 1
    print(line + ("; WRONG: all of them must" if wrong else ""), flush=True)
    return int(wrong)


def real_choices(check: Check, python: Path) -> tuple[list[int], list[str], list[float]]:
    """What the real router chooses, its workers' addresses, and seconds of decisions if timed."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        if check.peer in PROGRAMS:
            choices, addresses = choices_over_http(
                PROGRAMS[check.peer],
                python,
                check.settings,
                check.script,
                num_workers=NUM_REPLICAS,
                log=folder / "log",
                words=check.words,
            )
            return choices, addresses, []
        job: dict[str, Any] = {"peer": check.peer, "steps": check.script.to_json()}
        job |= {"num_replicas": NUM_REPLICAS, "settings": check.settings}
        (folder / "job").write_text(json.dumps(job))
        subprocess.run(
            [str(python), "-m", "benchmarks.peers.in_process", folder / "job", folder / "result"],
            cwd=ROOT,
            stdout=subprocess.DEVNULL,
            timeout=RUN_S,
            check=True,
        )
        result = json.loads((folder / "result").read_text())
        return result["choices"], [], result["seconds"]


def installed_version(peer: str, python: Path) -> str | None:
    """The version of a real router in an interpreter; None if it is not there."""
    code = f"import {PEERS[peer]}, importlib.metadata as m; print('=' + m.version({peer!r}))"
    done = subprocess.run(
        [str(python), "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    found = re.findall(r"^=(.+)$", done.stdout, re.MULTILINE)
    return found[-1] if done.returncode == 0 and found else None


def golden_case(check: Check, python: Path) -> dict[str, Any]:
    """A short comparison as a test replays it."""
    choices, addresses, _ = real_choices(check, python)
    return {
        "regime": check.regime,
        "settings": check.settings,
        "addresses": addresses,
        "choices": choices,
        "steps": check.script.to_json(),
    }


def write_golden(path: Path, peer: str, version: str, cases: list[dict[str, Any]]) -> None:
    """Writes what the real router chose, one case a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    path.write_text(f'{{"peer": "{peer}", "version": "{version}", "cases": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    sys.exit(main())
