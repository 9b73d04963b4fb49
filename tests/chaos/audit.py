"""Whether what was answered can be true: each answer by one known version a token, each once."""

from functools import lru_cache

import torch

from tests.chaos.traffic import ANSWER_TOKENS
from tests.chaos.trainer import model_of
from tests.engine.checks import TOLERANCE
from tests.fakes.versions import check_spans
from torchrl_vllm_sync.weights.audit import checksum

# Seconds by which this process may hear of a replica later than what happened.
HEARSAY_S = 3.0


class Auditor:
    """Knows every version's model, and compares.

    Args:
        checkpoint: What the engines were launched with.
    """

    def __init__(self, checkpoint):
        self._checkpoint = checkpoint
        self._model = lru_cache(maxsize=4)(lambda version: model_of(version, checkpoint))

    def check(self, asked, sent, outages, kept=()):
        """Raises unless every prompt was answered once, and truly.

        Args:
            asked: The prompts and their answers.
            sent: Versions that a trainer has sent, or begun to.
            kept: Those of them under which requests go on with the keys that they had.
            outages: ``(begin, end)`` of each time when no replica took requests.

        Returns:
            How many were answered, and how many ended in an error, as they may in an outage.
        """
        errors = 0
        spans = []
        for one in asked:
            told = f"{one.kind} prompt {one.prompt}: "
            assert len(one.outputs) + len(one.errors) == 1, f"{told}answered {one}"
            if one.errors:
                errors += 1
                assert any(
                    begin - HEARSAY_S < one.ended_at and one.began_at < end + HEARSAY_S
                    for begin, end in outages
                ), f"{told}replicas served, and it ended in {one.errors[0]!r}"
                continue
            (output,) = one.outputs
            assert list(output.prompt_token_ids) == one.prompt, f"{told}another's answer"
            assert len(output.outputs[0].token_ids) == ANSWER_TOKENS, f"{told}{output}"
            (own,) = output.version_spans
            check_spans(own, ANSWER_TOKENS)
            assert {span.version for span in own} <= sent, f"{told}unknown version in {own}"
            assert output.min_version >= one.floor, (
                f"{told}replica {output.replica_id} answered under version {output.min_version} "
                f"after version {one.floor} was committed"
            )
            spans += [
                (one, output, span)
                for at, span in enumerate(own)
                if not at or span.version not in kept
            ]
        self._check_log_probs(spans)
        return len(asked) - errors, errors

    def _check_log_probs(self, spans):
        """Every token's log-probability is that of the model of its version."""
        for version in sorted({span.version for _, _, span in spans}):
            mine = [entry for entry in spans if entry[2].version == version]
            rows = [one.prompt + list(output.outputs[0].token_ids) for one, output, _ in mine]
            expected = self._log_probs(version, rows)
            for (one, output, span), row in zip(mine, expected, strict=True):
                answer = output.outputs[0]
                found = torch.tensor(
                    [
                        answer.logprobs[at][answer.token_ids[at]].logprob
                        for at in range(span.start, span.end)
                    ]
                )
                begin = len(one.prompt) - 1 + span.start
                off = (found - row[begin : begin + len(found)]).abs().max().item()
                assert off < TOLERANCE, (
                    f"prompt {one.prompt}: replica {output.replica_id} answered tokens "
                    f"[{span.start}, {span.end}) of {output.version_spans} {off:.2g} off the "
                    f"model of version {version}"
                )

    @torch.no_grad()
    def _log_probs(self, version, rows):
        ids = torch.tensor(rows)
        logits = self._model(version)(input_ids=ids, use_cache=False).logits[:, :-1]
        return logits.float().log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]

    def check_parameters(self, version, found):
        """Raises unless the parameters of each worker are those of ``version``, bit by bit.

        Args:
            version: Policy version.
            found: Replica id to the checksums of its worker's parameters.
        """
        expected = checksum(_as_in_engines(self._model(version)))
        for replica_id, sums in found.items():
            names = expected.keys() | sums.keys()
            wrong = sorted(name for name in names if sums.get(name) != expected.get(name))
            assert not wrong, (
                f"replica {replica_id}: {len(wrong)} of {len(names)} parameters are not those "
                f"of version {version}: {wrong[:3]}"
            )


def _as_in_engines(model):
    """The parameters of ``model`` as vLLM holds them: projections of the same input joined."""
    tensors = model.state_dict()
    for module, names, whole in (
        ("self_attn.{}_proj", "qkv", "qkv"),
        ("mlp.{}_proj", ("gate", "up"), "gate_up"),
    ):
        for kind in ("weight", "bias"):
            for layer in range(model.config.num_hidden_layers):
                stem = f"model.layers.{layer}.{module}.{kind}"
                if stem.format(names[0]) in tensors:
                    parts = [tensors.pop(stem.format(name)) for name in names]
                    tensors[stem.format(whole)] = torch.cat(parts)
    return tensors.items()
