"""Dense rows, as columns of one TensorDict."""

import itertools

import torch
from tensordict import NonTensorStack, TensorDict
from torchrl.modules.llm.policies.common import LogProbs, Masks, Text, Tokens

from torchrl_vllm_sync.rl.rows import Texts

PAD = 7
_names = itertools.count()


def dense_rows(
    prompts, answers, *, queries=None, rewards=None, pad=PAD, classes=True, column=Texts.of
):
    """Rows with prompts and answers of the given lengths; tokens say of which row they are."""
    num = len(prompts)
    ids = [next(_names) for _ in range(num)]
    wide, long = max(prompts), max(answers)
    is_prompt = torch.arange(wide) >= wide - torch.tensor(prompts)[:, None]
    is_answer = torch.arange(long) < torch.tensor(answers)[:, None]
    mask = torch.cat([is_prompt, is_answer], 1)
    assistant = torch.cat([torch.zeros_like(is_prompt), is_answer], 1)
    marks = 100 + 50 * torch.tensor(ids)[:, None] + torch.arange(wide + long) - wide
    full = torch.where(mask, marks, pad)
    log_probs = torch.where(mask, -marks / 1000, float(pad))
    log_probs[:, :wide] = torch.nan
    versions = torch.where(assistant, 3, -1)
    rewards = torch.as_tensor(range(num) if rewards is None else rewards).float()
    done = torch.ones(num, 1, dtype=torch.bool)

    def node(kind, **entries):
        made = TensorDict(entries, [num])
        return kind._from_tensordict(made) if classes else made

    def halves(entry):
        return {"response": entry[:, wide:].clone(), "full": entry}

    text = [f"text of {one}" for one in ids]
    nexts = {"done": done, "terminated": done.clone(), "truncated": ~done}
    return TensorDict(
        {
            "tokens": node(Tokens, prompt=full[:, :wide].clone(), **halves(full)),
            "masks": node(Masks, all_attention_mask=mask, all_assistant_mask=assistant),
            "log_probs": node(LogProbs, **halves(log_probs)),
            "policy_versions": TensorDict(halves(versions), [num]),
            "policy_version": torch.full((num,), 3),
            "query": column(queries or ["a query"] * num),
            "row": column([f"row {one}" for one in ids]),
            "text": node(Text, prompt=column(queries or text), response=column(text)),
            "generation": TensorDict({"replica_id": column(["replica-0"] * num)}, [num]),
            "next": TensorDict({"reward": rewards.reshape(num, 1, 1), **nexts}, [num]),
        },
        [num],
    )


def stack_of(values):
    """A column as TorchRL has them."""
    return NonTensorStack(*values)


def contents(rows):
    """What each row holds where it attends, and what it holds elsewhere, whatever the widths."""
    found = []
    for row in rows.unbind(0):
        full, mask = row["tokens", "full"], row["masks", "all_attention_mask"]
        wide = row["tokens", "prompt"].shape[-1]
        is_answer = mask[wide:]
        versions, log_probs = row["policy_versions", "full"], row["log_probs", "full"]
        assert torch.equal(full, torch.cat([row["tokens", "prompt"], row["tokens", "response"]]))
        assert torch.equal(versions[wide:], row["policy_versions", "response"])
        assert log_probs[wide:].equal(row["log_probs", "response"])
        assert not row["masks", "all_assistant_mask"][:wide].any()
        assert row["masks", "all_assistant_mask"][wide:].equal(is_answer)
        found.append(
            {
                "row": row["row"],
                "text": (row["text", "prompt"], row["text", "response"]),
                "replica": row["generation", "replica_id"],
                "prompt": full[:wide][mask[:wide]].tolist(),
                "answer": full[wide:][is_answer].tolist(),
                "log_probs": log_probs[wide:][is_answer].tolist(),
                "versions": versions[mask].tolist(),
                "elsewhere": {*full[~mask].tolist()}
                | {*versions[~mask].tolist()}
                | {*log_probs[wide:][~is_answer].tolist()},
                "prompts_unknown": log_probs[:wide].isnan().all().item(),
                "reward": row["next", "reward"].item(),
            }
        )
    return found
