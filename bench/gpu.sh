#!/usr/bin/env bash
# Everything that needs one NVIDIA GPU, in one call of under nine minutes:
#
#   bench/gpu.sh [OUT]          OUT (bench-gpu) gets table.md, results.jsonl, tests.txt and log.txt
#
# Speed and memory of GPT-2 124M and 350M, HRM 100m and 1b (with each mode of activation checkpointing) and
# MLM base, in bf16 at context 1024 (MLM 512), compiled; tests/test_cuda.py; and the peers, where they are there:
# transformers if it can be imported, nanoGPT if NANOGPT names the directory of its model.py, as after
# git clone https://github.com/karpathy/nanoGPT. What is most wanted comes first; what no time is left for is
# left out and said so. BUDGET (530) is the time in seconds, PYTHON the interpreter; TRY=1 runs the same on
# a CPU with tiny models, to try this script out.
set -u
cd "$(dirname "$0")/.."
out=${1:-bench-gpu}
python=${PYTHON:-python}
budget=${BUDGET:-530}
started=$SECONDS
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
: > "$out/results.jsonl"; : > "$out/log.txt"; : > "$out/left-out.txt"
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$out/inductor}
export PYTORCH_ALLOC_CONF=expandable_segments:True

left() { echo $((budget - (SECONDS - started))); }

# measure SECONDS MODEL FLAGS…: one line of results.jsonl, if so many seconds are left; they also bound it
measure() {
    local limit=$1; shift
    if [ "$(left)" -lt 20 ]; then echo "no time for: $*" | tee -a "$out/left-out.txt"; return; fi
    [ "$limit" -gt "$(left)" ] && limit=$(left)
    [ -n "${TRY:-}" ] && set -- "$@" --device cpu --no-compile --batch 1 --seq-len 32 --n-layer 1 --steps 1 \
        --pairs 1
    echo "== bench/train.py $* ($((SECONDS - started)) s)" | tee -a "$out/log.txt"
    timeout -k 5 "$limit" "$python" bench/train.py "$@" --json "$out/results.jsonl" >> "$out/log.txt" 2>&1 \
        || echo "failed or took more than $limit s: $*; $(tail -n 1 "$out/log.txt")" | tee -a "$out/left-out.txt"
}

common="--steps 5 --pairs 5 --warmup 3"
nano="" hf=""
[ -n "${NANOGPT:-}" ] && [ -f "${NANOGPT:-}/model.py" ] && nano="--peer nanogpt --peer-source $NANOGPT"
"$python" -c "import transformers" 2>/dev/null && hf="--peer hf"
if [ -n "${TRY:-}" ]; then sizes="tiny tiny tiny tiny tiny"; else sizes="gpt2 gpt2-medium 100m 1b base"; fi
read -r gpt2 medium small large base <<< "$sizes"

measure 90 gpt2 --size "$gpt2" --batch 64 --seq-len 1024 $common $nano
few="$common --steps 2 --pairs 3"
for mode in selective block none; do
    measure 80 hrm --size "$large" --batch 24 --seq-len 1024 $few --checkpoint-activations $mode
done
measure 90 mlm --size "$base" --batch 64 --seq-len 512 $common $hf

echo "== tests/test_cuda.py ($((SECONDS - started)) s)"
limit=$(left)
if [ "$limit" -gt 120 ]; then limit=120; elif [ "$limit" -lt 1 ]; then limit=1; fi
timeout -k 5 "$limit" "$python" -m pytest -o addopts= -q tests/test_cuda.py > "$out/tests.txt" 2>&1
tail -n 3 "$out/tests.txt"

measure 90 gpt2 --size "$medium" --batch 32 --seq-len 1024 $common $nano
measure 60 hrm --size "$small" --batch 64 --seq-len 1024 $common --pairs 3
for mode in selective none; do  # how the speed of the modes compares where both surely fit
    measure 60 hrm --size "$large" --batch 8 --seq-len 1024 $few --checkpoint-activations $mode
done
[ -n "$hf" ] && measure 60 gpt2 --size "$gpt2" --batch 32 --seq-len 1024 $common $hf

"$python" - "$out" <<'PYTHON' | tee "$out/table.md"
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
import torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
print(f"{name}, torch {torch.__version__}\n")
columns = ["model", "batch", "checkpointing", "who", "precision", "tokens/s", "MFU", "peak GB",
           "s to first step", "loss", "ours / peer"]
print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
for line in (out / "results.jsonl").read_text().splitlines():
    run = json.loads(line)
    for who, r in run["contestants"].items():
        ratio = run["ratios"].get("seconds") if who == "ours" else None
        cells = [f"{run['model']} {run['size']}", f"{run['batch']} x {run['seq_len']}",
                 run["checkpoint_activations"], who, r["precision"], f"{r['tokens_per_sec']:,.0f}",
                 f"{r['mfu']:.1%}" if r.get("mfu") else "-", f"{r['gb']:.2f}", f"{r['first_step']:.1f}",
                 f"{r['loss']:.4f}", f"{ratio[1]:.2f} ({ratio[0]:.2f} to {ratio[2]:.2f})" if ratio else ""]
        print(f"| {' | '.join(cells)} |")
print("\n" + "\n".join((out / "tests.txt").read_text().splitlines()[-1:]))
left_out = (out / "left-out.txt").read_text()
print(left_out and f"\nNot measured:\n\n{left_out}")
PYTHON
echo "$((SECONDS - started)) s; all of it is in $out"
