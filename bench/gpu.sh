#!/usr/bin/env bash
# What only an NVIDIA GPU can tell, in three commands of under ten minutes each:
#
#   bench/gpu.sh 1 [OUT]    tests/test_cuda.py; GPT-2 124M at batch 64, HRM 1b, MLM base, with peers; the loss,
#                           attention, copies, matrix products
#   bench/gpu.sh 2 [OUT]    GPT-2 350M, 124M at batch 32, HRM 100m, the peers of transformers; then five minutes
#                           of real training: HRM 100m and GPT-2 124M, on the Python code of torch
#   bench/gpu.sh 3 [OUT]    what the wait for the device in clip_gradients costs: GPT-2 124M, MLM base and HRM
#                           100m, trained here and in a worktree of commit b3718ba, which never waits, in turn
#
# Each measurement is in OUT (bench-gpu) at once: partN.jsonl, partN.log, and partN.md, the tables, with
# predictions beside them. Keep OUT/part*: the rest is the compile cache, the prepared text and the runs. The
# most wanted comes first; partN.md lists what no time was left for. BUDGET (575) is the time in seconds,
# PYTHON the interpreter (python3), NANOGPT the directory of nanoGPT's model.py (git clone
# https://github.com/karpathy/nanoGPT); transformers is a peer where it is installed. BEFORE is a directory with
# the files of b3718ba, where git cannot make one. TRY=1 runs the same with tiny shapes on a CPU, to try it out.
set -u
cd "$(dirname "$0")/.." || exit 2
part=${1:-}
case $part in 1 | 2 | 3) ;; *) sed -n '2,/^set/s/^# \?//p' "$0"; exit 2 ;; esac
out=${2:-bench-gpu} python=${PYTHON:-python3} budget=${BUDGET:-575} reserve=0
mkdir -p "$out" && out=$(cd "$out" && pwd) || exit 2
json=$out/part$part.jsonl log=$out/part$part.log left_out=$out/left-out.txt tests=$out/tests.txt
for file in "$json" "$log" "$left_out" "$tests"; do : > "$file"; done
export TORCHINDUCTOR_CACHE_DIR=${TORCHINDUCTOR_CACHE_DIR:-$out/inductor}
export PYTORCH_ALLOC_CONF=expandable_segments:True PYTHONUNBUFFERED=1

# tables: partN.md from what there is so far
tables() {
    "$python" - "$part" "$out" <<'PYTHON' > "$out/part$part.md"
import json, os, platform, re, statistics, subprocess, sys, time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

part, out = sys.argv[1], Path(sys.argv[2])
PREDICTED = {  # tokens/s: by hand, by results/2026-11-21-rehearsal-sm90.md; the aim in brackets
    ("gpt2 gpt2", 64, "ours"): "486,000, 549,000 (560,000)",
    ("gpt2 gpt2", 64, "ours --fast"): "515,000, 562,000 (560,000)",
    ("gpt2 gpt2", 64, "nanogpt"): "510,000", ("hrm 1b", 24, "ours"): "24,800 to 26,400, 23,700 (27,000)",
    ("hrm 1b", 24, "ours --checkpoint-activations block"): "20,200 by the rehearsal",
    ("mlm base", 64, "ours"): "330,000, 455,000 (1.3 x ModernBERT)"}
LOSS_PREDICTED = "34 ms less than not compiled"


def table(title, columns, rows):
    if rows:
        print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{'---|' * len(columns)}")
        for row in rows:
            print(f"| {' | '.join(map(str, row))} |")


def said(*command):
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def installed(name):
    try:
        return f"{name} {version(name)}"
    except PackageNotFoundError:
        return f"no {name}"


lines = [json.loads(line) for line in (out / f"part{part}.jsonl").read_text().splitlines()]
of_kind = {kind: [line for line in lines if line["kind"] == kind]
           for kind in ("copy", "matmul", "attention", "loss")}
gpu = said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader") or "no GPU"
packages = ", ".join(map(installed, ("torch", "triton", "transformers")))
commit = said("git", "rev-parse", "--short", "HEAD") or "unknown"
print(f"# bench/gpu.sh {part}, {time.strftime('%F %T')}\n\n{gpu}; {os.cpu_count()} cores; Python "
      f"{platform.python_version()}, {packages}; commit {commit}")

table("Copies on the GPU, read and written:", ["GB", "ms", "GB/s"], [
    [f"{r['gb']:.3g}", f"{r['ms']:.3g}", f"{r['gb_per_sec']:,.0f}"] for r in of_kind["copy"]])
products = {}
for r in of_kind["matmul"]:
    cell = f"{r['tflops']:,.4g}" if "tflops" in r else r["error"]
    products.setdefault((r["name"], "{} x {} x {}".format(*r["shape"]), r["what"]), {})[r["workspace"]] = cell
table("Matrix products in TFLOP/s, by CUBLAS_WORKSPACE_CONFIG:",
      ["product", "rows x in x out", "", ":4096:8", "unset"],
      [[*key, cells.get(":4096:8", ""), cells.get("", "")] for key, cells in products.items()])
table("Attention, causal, bfloat16; * is what torch chooses by itself; equal: two backward passes:",
      ["B, H, T, D", "", "backend", "ms forward", "ms forward and backward", "equal"], [
          [str(r["shape"])[1:-1], "strict" if r["strict"] else "fast", r["backend"] + " *" * r["chosen"]] + (
              [r["error"], "", ""] if "error" in r else
              [f"{r['forward_ms']:.3f}", f"{r['both_ms']:.3f}", "yes" if r["equal"] else "NO"])
          for r in of_kind["attention"]])
table("The loss of 65,536 x 768 on 50,304 rows, gradients included:",
      ["", "rows at a time", "ms", "predicted", "peak GB", "s for the first", "loss"],
      [["compiled" if r["compiled"] else "not compiled", r["rows"]] + (
          [r["error"], "", "", "", ""] if "error" in r else
          [f"{r['ms']:.2f}", LOSS_PREDICTED if r["compiled"] and r["rows"] == 16384 else "",
           f"{r['gb']:.2f}", f"{r['first_s']:.1f}", f"{r['loss']:.4f}"]) for r in of_kind["loss"]])

runs = {line["command"]: line for line in lines if "contestants" in line}  # the last line of each
rows, kernels = [], []
for run in runs.values():
    name = f"{run['model']} {run['size']}"
    for who, r in run["contestants"].items():
        about = [name, f"{run['batch']} x {run['seq_len']}", who]
        if "seconds" not in r:
            rows.append([*about, r.get("error", "cut short before its first round"), *[""] * 11])
            continue
        ratio = run["ratios"].get(who, {}).get("seconds")
        cut = f" (cut short after {len(r['rounds'])} rounds)" if run["kind"] == "round" else ""
        rows.append([*about, f"{r['tokens_per_sec']:,.0f}{cut}", PREDICTED.get((name, run["batch"], who), ""),
                     f"{1000 * r['seconds']:,.1f}", f"{1000 * r['host']:,.1f}" if r["host"] else "",
                     f"{r['mfu']:.1%}" if r["mfu"] else "", f"{r['gb']:.2f}", f"{r['first_step']:.1f}",
                     f"{r['loss']:.4f}", r["precision"], r.get("attention") or "",
                     "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratio) if ratio else "", r.get("error", "")])
        if who.startswith("ours") and "kernels" in r:
            kernels.append((f"{name}, batch {run['batch']}, {who}", r["kernels"]))
table("Training, medians of rounds in turn:",
      ["", "batch", "who", "tokens/s", "predicted (aim)", "ms a step", "host ms", "MFU", "peak GB",
       "s to first step", "loss", "precision", "attention", "ours / it", ""], rows)
for title, found in kernels:
    table(f"Kernels of a step of {title}:", ["kernel", "calls", "ms", "share"], [
        [f"`{k['name']}`", f"{k['calls']:g}", f"{k['ms']:.2f}", f"{k['share']:.1%}"] for k in found])

trained = []
for path in sorted(out.glob("runs/*/metrics.jsonl")):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    val = [f"{r['val_loss']:.4f} after {r['step']}" for r in records if r["val_loss"] is not None]
    if records:
        last = records[-1]
        speed = statistics.median(r["tokens_per_sec"] for r in records)
        trained.append([path.parent.name, last["step"], f"{last['tokens']:,}", f"{speed:,.0f}",
                        f"{last['mfu']:.1%}" if last["mfu"] else "", f"{last['mem_gb']:.1f}",
                        f"{records[0]['loss']:.3f}", f"{last['loss']:.4f}", ", ".join(val[-3:])])
table("Real training:", ["", "steps", "tokens", "tokens/s, median", "MFU", "peak GB", "first loss",
                         "last loss", "validation loss"], trained)

def speeds(version, pair):
    """tokens/s by step, of the second half of a run."""
    path = out / "wait" / f"{pair}-{version}" / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    found = {r["step"]: r["tokens_per_sec"] for r in map(json.loads, text.splitlines()) if "loss" in r}
    return {step: speed for step, speed in found.items() if step > max(found) / 2}


waits = {}
for path in sorted(out.glob("wait/*-now")):
    pair = path.name.removesuffix("-now")
    now, before = speeds("now", pair), speeds("before", pair)
    both = now.keys() & before.keys()
    if both:
        medians = [statistics.median(found[step] for step in both) for found in (now, before)]
        waits.setdefault(pair.rpartition("-")[0], []).append(medians)
rows = []
for trainer, pairs in waits.items():
    now, before = map(statistics.median, zip(*pairs))
    ratios = sorted(now / before for now, before in pairs)
    rows.append([trainer, f"{now:,.0f}", f"{before:,.0f}", f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} "
                 f"to {ratios[-1]:.3f})", len(pairs)])
table("One wait for the device a step, against b3718ba, which never waits. Predicted by hand: 0.987 to 0.997, "
      "because the GPU idles for 0.3 to 1.5 ms of 119 while Python launches its first kernels after the wait:", ["", "tokens/s", "b3718ba", "ratio (least to most)", "pairs of runs"], rows)

outcomes = {}
for line in (out / "tests.txt").read_text().splitlines():
    if found := re.search(r"(PASSED|FAILED|ERROR|SKIPPED)", line):
        if test := re.search(r"tests/\S+::\S+", line):
            outcomes[test[0]] = found[0]
table("tests/test_cuda.py:", ["outcome", "tests"], [
    [outcome, len(names) if outcome in ("PASSED", "SKIPPED") else ", ".join(names)]
    for outcome in sorted({*outcomes.values()})
    if (names := [test for test, found in outcomes.items() if found == outcome])])
if left_out := (out / "left-out.txt").read_text():
    print(f"\nNot or not fully measured:\n\n{left_out}")
commands = re.findall(r"^== (.*)", (out / f"part{part}.log").read_text(), re.MULTILINE)
print("\nCommands:\n\n" + "\n".join(f"    {command}" for command in commands))
PYTHON
}

# limited SECONDS SIGNAL COMMAND…: runs it for so long at most, and leaves `reserve` seconds to what follows.
# 124 and 137 say that time was up; a trainer that SIGTERM stops has done all it should.
limited() {
    local limit=$1 signal=$2 left=$((budget - reserve - SECONDS)) code; shift 2
    [ "$limit" -gt "$left" ] && limit=$left
    if [ "$limit" -lt 20 ]; then echo "* no time for: $*" | tee -a "$left_out"; return; fi
    echo "== python $* (at $SECONDS s, $limit s at most)" | tee -a "$log"
    timeout -k 20 -s "$signal" "$limit" "$python" "$@" >> "$log" 2>&1; code=$?
    case $code-$signal in
        0-* | 124-TERM) ;;
        124-* | 137-*) echo "* cut short after $limit s: $*" | tee -a "$left_out" ;;
        *) echo "* failed: $*: $(tail -n 1 "$log")" | tee -a "$left_out" ;;
    esac
    tables
}

# shellcheck disable=SC2086  # variables of several flags, here and below
kernels() { limited "$1" KILL bench/kernels.py "${@:2}" $device --json "$json"; }
# shellcheck disable=SC2086
train() { limited "$1" KILL bench/train.py "${@:2}" $few --json "$json" --verbose; }
directory() {  # of a package, or nothing
    "$python" -c "from importlib.util import find_spec
found = find_spec('$1')
print(*found.submodule_search_locations if found else [])"
}

# cuda_tests SECONDS FLAGS…: tests/test_cuda.py, whose output says what has passed even if it is cut short
cuda_tests() {
    local limit=$1 before; shift
    before=$(wc -l < "$log")
    limited "$limit" INT -m pytest -o addopts= -v -p no:cacheprovider "$@" tests/test_cuda.py
    tail -n "+$((before + 1))" "$log" >> "$tests"
    tables
}

device="" few="" gpt2=gpt2 medium=gpt2-medium small=100m large=1b base=base
if [ -n "${TRY:-}" ]; then
    device="--device cpu" gpt2=tiny medium=tiny small=tiny large=tiny base=tiny
    few="--device cpu --no-compile --batch 2 --seq-len 32 --n-layer 1 --steps 1 --pairs 2 --warmup 1"
fi
nano="" hf="" workers=""
if [ -f "${NANOGPT:-}/model.py" ]; then nano="--peer nanogpt --peer-source $NANOGPT"
else echo "* nanoGPT: NANOGPT is no directory with its model.py" >> "$left_out"; fi
transformers=$(directory transformers)
if [ -n "$transformers" ]; then hf="--peer hf"; else echo "* transformers: not installed" >> "$left_out"; fi
[ -n "$(directory xdist)" ] && workers="-n $(($(nproc) < 16 ? $(nproc) : 16)) --dist worksteal"
common="--steps 5 --pairs 5 --warmup 3 --profile 3"

# shellcheck disable=SC2086  # variables of several flags
if [ "$part" = 1 ]; then
    reserve=200  # for the measurements
    cuda_tests 260 $workers
    reserve=5
    train 110 gpt2 --size $gpt2 --batch 64 --seq-len 1024 $common --also=--fast $nano
    train 150 hrm --size $large --batch 24 --seq-len 1024 --checkpoint-activations selective \
        "--also=--checkpoint-activations block" $common --steps 2 --pairs 3
    train 120 mlm --size $base --batch 64 --seq-len 512 $common $hf
    kernels 75 loss
    kernels 45 attention
    kernels 60 copy matmul
elif [ "$part" = 2 ]; then
    # The standard library alone would be seen a dozen times. This takes other cores while the rest compiles.
    text="$(directory torch)/**/*.py" tokenizer=bpe:8192
    steps=250 more_steps=600 size="--batch 64 --global-batch 64 --seq-len 1024"
    [ -n "${TRY:-}" ] && text="*.py" tokenizer=bytes steps=3 more_steps=3 size="--batch 2 --seq-len 32"
    rm -rf "$out/runs"
    timeout 250 nice "$python" data.py prepare --dataset "text:$text" --tokenizer $tokenizer \
        --out "$out/shards" --workers 6 > "$out/prepare.log" 2>&1 &
    reserve=310  # for the real training
    train 110 gpt2 --size $medium --batch 32 --seq-len 1024 $common --also=--fast $nano
    train 90 gpt2 --size $gpt2 --batch 32 --seq-len 1024 $common --also=--fast $nano
    hrm_hf=""
    [ -d "$transformers/models/hrm_text" ] && hrm_hf=$hf  # since 5.23
    train 110 hrm --size $small --batch 32 --seq-len 1024 $common --pairs 3 $hrm_hf
    [ -n "$hf" ] && train 80 gpt2 --size $gpt2 --batch 32 --seq-len 1024 $common $hf
    wait
    tail -n 3 "$out/prepare.log" >> "$log"
    common="--data $out/shards $size $device --warmup 30 --eval-every 100 --eval-batches 10 --keep-last 1"
    reserve=155
    limited 150 TERM train_hrm.py --size $small --steps $steps $common --out "$out/runs/hrm"
    reserve=5
    limited 150 TERM train_gpt2.py --size $gpt2 --steps $more_steps $common --out "$out/runs/gpt2"
    for run in hrm gpt2; do
        cp "$out/runs/$run/metrics.jsonl" "$out/part2-$run.jsonl"
        cp "$out/runs/$run/training_history.png" "$out/part2-$run.png"
    done
else
    before=${BEFORE:-$out/before} reserve=5 pairs="1 2 3 4"
    gpt2_flags="--size $gpt2 --batch 64 --global-batch 64 --seq-len 1024"
    mlm_flags="--size $base --batch 64 --global-batch 64 --seq-len 512"
    hrm_flags="--size $small --batch 32 --global-batch 32 --seq-len 1024"
    common="--data $out/wait/shards --steps 100 --log-every 20 --eval-every 100 --eval-batches 1 --keep-last 1"
    if [ -n "${TRY:-}" ]; then
        pairs="1 2" gpt2_flags="--size tiny" mlm_flags="--size tiny" hrm_flags="--size tiny"
        common="${common/100/4} --log-every 1 --batch 2 --global-batch 2 --seq-len 32 --n-layer 1 $device"
    fi
    if [ ! -d "$before" ]; then
        git worktree add -f --detach "$before" b3718ba >> "$log" 2>&1 || { tail -n 1 "$log"; exit 2; }
    fi
    rm -rf "$out/wait"
    limited 90 KILL "$before/data.py" prepare --dataset stdlib --tokenizer bpe:4096 --out "$out/wait/shards"
    for pair in $pairs; do
        for trainer in gpt2 mlm hrm; do
            flags=${trainer}_flags versions="now before"
            [ $((pair % 2)) = 0 ] && versions="before now"
            for version in $versions; do
                code=.
                [ $version = before ] && code=$before
                limited 150 TERM "$code/train_$trainer.py" ${!flags} $common \
                    --out "$out/wait/$trainer-$pair-$version"
                rm -rf "$out/wait/$trainer-$pair-$version/checkpoints"
            done
        done
    done
    [ -n "${BEFORE:-}" ] || git worktree remove --force "$before"
fi
tables
cat "$out/part$part.md"
echo "$SECONDS s; all of it is in $out"
