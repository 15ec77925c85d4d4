#!/usr/bin/env bash
# shellcheck disable=SC2086,SC2046  # variables and functions that give several flags
# Measures what needs NVIDIA GPUs, in parts. Nothing else runs during a timing:
#
#   bench/gpu.sh A [OUT]    335 s: GPT-2 124M and MLM base in turn with peers; the loss.
#                           Carries .ab/before and .ab/nanogpt.
#   bench/gpu.sh B [OUT]    505 s: HRM 1b; attention; GB/s of each Triton kernel; the loss kernel's shape; then
#                           tests/test_cuda.py, tests of resuming first. Carries .ab/before.
#   bench/gpu.sh C [OUT]    200 s: do killed runs on two GPUs resume bit for bit? Carries nothing.
#   bench/gpu.sh D [OUT]    570 s: validation loss over 150 s of GPT-2 124M, by our recipe and by nanoGPT's.
#                           Carries .ab/text.tar.xz (17 MiB) and .ab/nanogpt.
#   bench/gpu.sh E [OUT]    570 s: each size that fits one GPU, with its row's micro-batch and half of it:
#                           tokens/s, whether the loss falls, memory compared with --dry-run. Carries nothing.
#
# To prepare, in the root of the repository. If one of these is missing, a part measures the rest and says so:
#
#   mkdir -p .ab/before .ab/nanogpt && echo /.ab/ >> .git/info/exclude
#   git archive COMMIT | tar x -C .ab/before                     # an older checkout, or set BEFORE=DIR
#   cp NANOGPT/model.py .ab/nanogpt                              # or NANOGPT=DIR; git clone
#                                                                # https://github.com/karpathy/nanoGPT
#   python bench/text.py .ab/text.tar.xz                         # or TEXT=FILE
#
# On a lent machine with an H200, because contestants together take up to 120 GB. It doesn't need .git:
#
#   run "bash bench/gpu.sh A $OUT" timeout_s=350 kind=nvidia-h200 carry=[".ab/before", ".ab/nanogpt"]
#
# OUT (bench-gpu) gets each number at once: partA.jsonl, partA.log, partA.md (complete tables with predictions,
# to commit as a result), partB-*.txt (tests). transformers is a peer if it's installed. PYTHON is the
# interpreter (python3), BUDGET another number of seconds. TRY=1 runs the same on a CPU with tiny shapes.
set -u
cd "$(dirname "$0")/.." || exit 2
part=${1:-} out=${2:-${OUT:-bench-gpu}} python=${PYTHON:-python3} try=${TRY:-}
before=${BEFORE:-.ab/before} nanogpt=${NANOGPT:-.ab/nanogpt} text=${TEXT:-.ab/text.tar.xz}
case $part in
    A) budget=335 ;;
    B) budget=505 ;;
    C) budget=200 ;;
    D | E) budget=570 ;;
    *) sed -n '3,/^set/s/^# \?//p' "$0"; exit 2 ;;
esac
budget=${BUDGET:-$budget}
mkdir -p "$out" && out=$(cd "$out" && pwd) && scratch=$(mktemp -d) || exit 2
trap 'sweep "$scratch"; rm -rf "$scratch"' EXIT
rm -f "$out/part$part"[.-]*
json=$out/part$part.jsonl log=$out/part$part.log left=$scratch/left
touch "$json" "$log" "$left"
export PYTHONUNBUFFERED=1

# tables: partN.md from what there is so far
tables() {
    "$python" - "$part" "$out" "$left" <<'PYTHON' > "$out/part$part.md"
import json, os, platform, re, shlex, subprocess, sys, time
from collections import Counter
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

part, out, left = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
log = re.sub(r"\x1b\[[\d;]*m", "", (out / f"part{part}.log").read_text(errors="replace"))
PREDICTED = {  # by hand, for one H200; "before" is of results/2026-11-27-gpu-h200.md
    "gpt2 gpt2": {"ours": "120 to 123 ms", "ours --fast": "115 to 118 ms", "before": "132 ms",
                  "nanogpt": "123 ms"},
    "mlm base": {"ours": "84 to 87 ms", "before": "93 ms", "hf": "113 ms"},
    "hrm 1b block": {"before": "1,194 ms"}, "hrm 1b selective": {"ours --fast": "25,700 to 26,300 tokens/s"}}


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


gpu = said("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader") or "no GPU"
packages = ", ".join(map(installed, ("torch", "triton", "transformers")))
print(f"# bench/gpu.sh {part}, {time.strftime('%F %T')}\n\n{gpu}; {os.cpu_count()} cores; Python "
      f"{platform.python_version()}, {packages}; commit {said('git', 'rev-parse', '--short', 'HEAD') or '?'}")

tests = []
for path in sorted(out.glob(f"part{part}-*.txt")):
    text = path.read_text(errors="replace")
    if summary := re.findall(r"^=+ (.* in [\d.]+s.*?) =+$", text, re.M):
        bad = sorted({*re.findall(r"^(?:FAILED|ERROR) \S*::(\S+)", text, re.M)})
        tests.append([path.stem.partition("-")[2], summary[-1], ", ".join(bad)])
table("Tests:", ["", "outcome", "failed"], tests)

lines = [json.loads(line) for line in (out / f"part{part}.jsonl").read_text().splitlines()]
cut = {line["of"] for line in lines if line["kind"] == "cut"}  # tables that are not complete
firsts = {}  # the lines after the first round
for line in lines:
    if line["kind"] == "round":
        firsts.setdefault(line["command"], line)
runs = {line["command"]: line for line in lines if line["kind"] == "result"}
rows, sizes, kernels, failed = [], [], [], []
predicted = {line["of"]: line["gb"] / 1.0737 for line in lines if line["kind"] == "memory"}  # GiB
for command, run in runs.items():
    mode = run["checkpoint_activations"].replace("none", "")
    name = f"{run['model']} {run['size']} {mode}".strip()
    for who, r in run["contestants"].items():
        who = "before" if "--code" in who else who + " --fast" * ("--fast" in shlex.split(command))
        about = [name, f"{run['batch']} x {run['seq_len']}", who]
        if "error" in r:
            failed.append(f"* {', '.join(about)}: {r['error']}\n")
        if "seconds" not in r:
            continue
        if part == "E":
            words = [word for word in shlex.split(command) if not word.startswith("--also")]
            words += shlex.split(who)  # which has the flags of this one; the last counts
            given = dict(zip(words, words[1:]))
            asked = [given[flag] for flag in ("--size", "--batch", "--checkpoint-activations")]
            tried = " ".join([run["model"], *asked])
            speed = int(given["--batch"]) * run["seq_len"] / r["seconds"]
            mfu = r["flops"] * speed / r["peak_flops"] if r["peak_flops"] else None
            first = firsts[command]["contestants"][who]["loss"]
            sizes.append([tried, f"{speed:,.0f}", f"{1000 * r['seconds']:,.1f}", f"{mfu:.1%}" if mfu else "",
                          f"{first:.4f} to {r['loss']:.4f}", "yes" if r["loss"] < first else "NO",
                          f"{r['gb']:.2f}", f"{predicted[tried]:.2f}" if tried in predicted else ""])
            continue
        ratio = next((found["seconds"] for key, found in run["ratios"].items() if key == who
                      or who == "before" and "--code" in key), None)
        rows.append([*about, f"{1000 * r['seconds']:,.1f}", PREDICTED.get(name, {}).get(who, ""),
                     f"{r['tokens_per_sec']:,.0f}", f"{1000 * r['host']:,.1f}" if r["host"] else "",
                     f"{1000 * r['launching']:,.1f} in {r['launches']:,.0f}" if r.get("launches") else "",
                     f"{r['sm_mhz']:,.0f}" if r.get("sm_mhz") else "",
                     f"{r['watts']:.0f} of {r['watts_limit']:.0f}" if r.get("watts_limit") else "",
                     f"{r['mfu']:.1%}" if r["mfu"] else "", f"{r['gb']:.2f}", f"{r['first_step']:.1f}",
                     f"{r['loss']:.4f}", r["precision"], r.get("attention") or "",
                     "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratio) if ratio else ""])
        if "kernels" in r and (who.startswith("ours") or who == "before"):
            kernels.append((f"{name}, batch {run['batch']}, {who}", r["kernels"]))
table("Training, medians of rounds in turn:",
      ["", "batch", "who", "ms a step", "predicted", "tokens/s", "host ms, empty queue", "ms in launches",
       "SM MHz", "W", "MFU", "peak GiB",
       "s to first step", "loss", "precision", "attention", "ours / it"], rows)
table("Ten steps of each size, after one that compiles:",
      ["size, micro-batch, recomputed", "tokens/s", "ms a step", "MFU", "loss after five and ten", "falls",
       "peak GiB", "predicted by --dry-run"], sizes)
for line in lines:
    if line["kind"] == "curves":
        for who, r in line["found"].items():
            rates = ", ".join(f"{lr} {loss:.3f}" for lr, loss in r["rates"].items())
            print(f"\n{who}: rate {r['lr']:g} (a small model's losses: {rates}), {r['steps']} steps of "
                  f"{r['step_ms']:.1f} ms, {r['whole_s']:.0f} s in all; the text was seen {r['epochs']:.2f} "
                  "times.")
            table(f"Validation loss over time, {who}:", ["seconds of training", "step", "validation loss"],
                  [[f"{s:.1f}", step, f"{loss:.4f}"] for s, step, loss in r["curve"]])
losses = [line for line in lines if line["kind"] == "loss" and "loss" not in cut]
table("The loss of 65,536 x 768 on 50,304 rows, gradients included:",
      ["", "rows at a time", "ms", "predicted", "peak GiB", "s for the first", "loss"],
      [["compiled" if r["compiled"] else "not compiled", r["rows"]] + (
          [r["error"], "", "", "", ""] if "error" in r else
          [f"{r['ms']:.2f}", "25 to 26.5 (31.3 before)" if r["compiled"] and r["rows"] == 16384 else "",
           f"{r['gb']:.2f}", f"{r['first_s']:.1f}", f"{r['loss']:.4f}"]) for r in losses])
picked = Counter((r["rows"], *found) for r in losses for found in r.get("configs", {}).items())
table("What Inductor picked for its kernels:", ["rows at a time", "kernel", "shape", "starts"],
      [[size, f"`{kernel}`", shape, starts] for (size, kernel, shape), starts in picked.items()])
table("Attention, causal, bfloat16; * is what torch chooses by itself; equal: two backward passes:",
      ["B, H, T, D", "", "backend", "ms forward", "ms forward and backward", "equal"], [
          [str(r["shape"])[1:-1], "strict" if r["strict"] else "fast", r["backend"] + " *" * r["chosen"]] + (
              [r["error"], "", ""] if "error" in r else
              [f"{r['forward_ms']:.3f}", f"{r['both_ms']:.3f}", "yes" if r["equal"] else "NO"])
          for r in lines if r["kind"] == "attention" and "attention" not in cut])
moved = re.findall(r"\] ([\d.]+)ms\s+([\d.]+) GB\s+([\d.]+)GB/s\s+(triton\w+)", log)
table("What the Triton kernels of GPT-2 move in a call:", ["kernel", "ms", "GB", "GB/s"], [
    [f"`{kernel}`", ms, gb, speed] for ms, gb, speed, kernel in sorted(moved, key=lambda m: -float(m[0]))])
for title, found in kernels:
    table(f"Kernels of a step of {title}:", ["kernel", "calls", "ms", "share"], [
        [f"`{k['name']}`", f"{k['calls']:g}", f"{k['ms']:.2f}", f"{k['share']:.1%}"] for k in found])
if missing := left.read_text() + "".join(failed):
    print(f"\nNot or not fully measured:\n\n{missing}", end="")
print("\nCommands:\n")
for command in re.findall(r"^== (.*)", log, re.M):
    print(f"    {command}")
PYTHON
}

# sweep MARK: ends all that was started with it, also what has a session of its own, and waits for that
sweep() {
    local pids
    for _ in {1..100}; do
        pids=$(grep -lsz "^BENCH_STEP=$1" /proc/[0-9]*/environ | tr -dc '0-9\n')
        [ -z "$pids" ] && return
        kill -KILL $pids 2> /dev/null
        sleep 0.1
    done
}

left_out() { echo "* $*" | tee -a "$log" >> "$left"; }

# limited SECONDS FILE COMMAND…: runs it for so long at most, within what is left; FILE gets what it says
limited() {
    local limit=$1 file=$2 rest=$((budget - SECONDS)) mark=$scratch/$BASHPID/ code; shift 2
    local command=${*//$out/OUT}
    [ "$limit" -gt "$rest" ] && limit=$rest
    if [ "$limit" -lt 15 ]; then left_out "no time for: $command"; return 1; fi
    echo "== at $SECONDS s, $limit at most: $command" | tee -a "$log"
    BENCH_STEP=$mark nice -n "${nice:-0}" timeout -k "${grace:-5}" -s INT "$limit" "$@" >> "$file" 2>&1
    code=$?
    sweep "$mark"
    case $code in
        0) ;;
        124 | 137) left_out "cut short after $limit s: $command" ;;
        *) left_out "failed ($code): $command: $(tail -n 1 "$file")" ;;
    esac
    echo "-- at $SECONDS s: $code" >> "$log"
    return $code
}

tests() {  # SECONDS NAME FLAGS…
    grace=15 TORCHINDUCTOR_CACHE_DIR=$scratch/$2 limited "$1" "$out/part$part-$2.txt" \
        "$python" -m pytest -o addopts= -p no:cacheprovider -v "${@:3}"
}
bench() {  # SECONDS SCRIPT FLAGS…
    TORCHINDUCTOR_CACHE_DIR=${cache:-$scratch/inductor} limited "$1" "$log" \
        "$python" "bench/$2" "${@:3}" --json "$json" ||
        echo "{\"kind\": \"cut\", \"of\": \"$3\"}" >> "$json"
    tables
}
train() { bench "$1" train.py "${@:2}" $few --verbose; }

flags() {  # SIZE,BATCH,MODE
    local size batch mode
    IFS=, read -r size batch mode <<< "$1"
    echo --size $size --batch $batch --checkpoint-activations $mode
}

few="" device="" gpt2=gpt2 large=1b base=base killed=4 others=11 chunks="" old="" nano="" hf="" tiny=""
nvidia-smi >> "$log" 2>&1
if [ -n "$try" ]; then
    device="--device cpu" gpt2=tiny large=tiny base=tiny killed=1 others=1 chunks="--rows 16384" tiny="--tiny"
    few="$device --no-compile --batch 2 --seq-len 32 --n-layer 1 --steps 1 --pairs 2 --warmup 1"
fi
if [[ $part != [AB] ]]; then :
elif [ -f "$before/bench/train.py" ]; then old="--also=--code $before"
else left_out "the older checkout: there is no $before/bench/train.py"; fi
if [[ $part != [AD] ]]; then :
elif [ -f "$nanogpt/model.py" ]; then nano=$nanogpt
else left_out "nanoGPT: there is no $nanogpt/model.py"; fi

if [ "$part" = A ]; then
    rounds="--steps 5 --pairs 5 --warmup 3 --profile 3"
    if "$python" -c 'import importlib.util as u; exit(not u.find_spec("transformers"))'; then hf="--peer hf"
    else left_out "transformers: not installed"; fi
    train 100 gpt2 --size $gpt2 --batch 64 --seq-len 1024 $rounds --also=--fast ${old:+"$old"} \
        ${nano:+--peer nanogpt --peer-source "$nano"}
    train 180 mlm --size $base --batch 64 --seq-len 512 $rounds ${old:+"$old"} $hf  # 90 s to compile three
    bench 50 kernels.py loss $device $chunks
elif [ "$part" = B ]; then
    rounds="--steps 2 --pairs 3 --warmup 3 --profile 3"
    hrm="hrm --size $large --batch 24 --seq-len 1024"
    train 100 $hrm --checkpoint-activations block $rounds --also=--fast ${old:+"$old"}
    train 60 $hrm --checkpoint-activations selective --fast $rounds
    bench 45 kernels.py attention $device
    # Inductor says GB/s in its log; with TORCHINDUCTOR_PROFILE_OUTPUT torch 2.11 stops at an error of its own
    TORCHINDUCTOR_PROFILE=1 TORCH_LOGS=torch._inductor.runtime.triton_heuristics \
        TORCHINDUCTOR_CACHE_DIR=$scratch/moved limited 45 "$log" "$python" bench/train.py gpt2 --size $gpt2 \
        --batch 64 --seq-len 1024 --steps 1 --pairs 1 --warmup 1 $few --verbose
    for start in 1 2 3; do
        cache=$scratch/start$start bench 25 kernels.py loss $device --rows 16384
    done
    # those of resuming come first on the CPUs and have their own workers: one takes as long as all others
    tests 180 killed tests/test_cuda.py -k "killed and not two_gpus" -n $killed &
    nice=19 tests 180 others tests/test_cuda.py -k "not killed and not two_gpus" -n $others --dist worksteal &
    wait
elif [ "$part" = C ]; then
    if [ -n "$try" ]; then
        tests 180 two-gpus --full tests/whole_runs/test_kill_and_resume.py -k "killed_run and gpt2-2"
    else
        tests 180 two-gpus tests/test_cuda.py -k two_gpus -n 4
    fi
elif [ "$part" = D ]; then
    if [ -n "$try" ]; then
        limited 60 "$log" "$python" data.py prepare --dataset stdlib --tokenizer bytes --max-tokens 200k \
            --val-split hash:0.2 --out "$scratch/text"
    elif [ -f "$text" ]; then
        limited 60 "$log" "$python" -m tarfile -e "$text" "$scratch"
    fi
    if [ -f "$scratch/text/manifest.json" ]; then
        bench 560 curves.py "$scratch/text" ${nano:+--nanogpt "$nano"} $device $tiny --seconds ${try:+0.}150
    else
        left_out "the text: there is no $text"
    fi
else
    # what stands in a line compiles at the same time, and lies in memory together: 119 GB at most
    groups=("hrm 25m,32,none 25m,16,none 100m,64,none 100m,32,none"
            "hrm 350m,32,selective 350m,16,selective 350m,32,block 350m,16,block"
            "hrm 1b,24,selective 1b,12,block"
            "hrm 1b,12,selective 1b,24,block"
            "gpt2 gpt2-medium,16,none gpt2-medium,8,none gpt2-large,16,none gpt2-large,8,none"
            "mlm large,32,none large,16,none")
    [ -z "$try" ] || groups=("hrm tiny,2,selective tiny,1,block" "gpt2 tiny,2,none tiny,1,none"
                             "mlm tiny,2,none tiny,1,none")
    memory() {  # MODEL SIZE,BATCH,MODE: what --dry-run says, in GB, as a line of JSON
        local gb
        gb=$("$python" "train_$1.py" --dry-run 1x143 $(flags $2) --global-batch "$(cut -d, -f2 <<< "$2")" \
            | awk '$1 == "ddp" {print $7 + 0; exit}')
        [ -z "$gb" ] || echo "{\"kind\": \"memory\", \"of\": \"$1 ${2//,/ }\", \"gb\": $gb}" >> "$json"
    }
    for group in "${groups[@]}"; do
        read -r model all <<< "$group"
        for one in $all; do memory $model $one & done 2>> "$log"
    done
    wait
    for group in "${groups[@]}"; do
        read -r model first others <<< "$group"
        also=()
        for one in $others; do also+=("--also=$(flags $one)"); done
        train 120 $model $(flags $first) --steps 5 --pairs 2 --warmup 1 "${also[@]}"
    done
fi
tables
cat "$out/part$part.md"
echo "$SECONDS s; all of it is in $out"
