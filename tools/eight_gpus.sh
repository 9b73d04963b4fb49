#!/usr/bin/env bash
# All that eight GPUs of one host are to be asked, in one go of about an hour at most:
#     PYTHON=python3 tools/eight_gpus.sh DIRECTORY        (records, and a log of each part)
#     PYTHON=python3 tools/eight_gpus.sh DIRECTORY smoke  (the same on CPUs, for a look at the script)
# Every part runs even if an earlier one failed; the exit status is the number of those that did.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:?a directory for the records}") python=${PYTHON:-python} failed=0
mkdir -p "$out"

part() { # name, seconds, arguments
    local name=$1 limit=$2
    shift 2
    if timeout "$limit" "$python" "$@" >"$out/$name.log" 2>&1; then
        echo "$name ran"
    else
        echo "$name failed"
        failed=$((failed + 1))
    fi
}

push() { # name, seconds, arguments
    local name=$1 limit=$2
    shift 2
    part "$name" "$limit" -m benchmarks.weight_sync --out "$out" "$@"
}

if [[ ${2:-} = smoke ]]; then
    push ranks 400 --smoke --ranks 2 --systems broadcast p2p
    push replicas 400 --smoke --replicas 2 --systems broadcast p2p
    part tutorial 400 tutorials/06_fsdp_expert_parallel.py --smoke
    exit "$failed"
fi
graphs=(--decode graphs)
push 8b-4-to-4 600 --model 8b --ranks 4 --tensor-parallel 4 "${graphs[@]}" --systems raw-nccl vllm-nccl broadcast p2p
push 30b-a3b-4-to-4 900 --model 30b-a3b --ranks 4 --tensor-parallel 4 --expert-parallel "${graphs[@]}" --systems vllm-nccl broadcast p2p
for replicas in 3 7; do
    push "8b-1-to-$replicas" 600 --model 8b --replicas "$replicas" "${graphs[@]}" --systems raw-nccl broadcast p2p
done
part tutorial 600 tutorials/06_fsdp_expert_parallel.py --shape 30b-a3b
exit "$failed"
