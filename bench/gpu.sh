#!/usr/bin/env bash
# shellcheck disable=SC2086  # variables of several flags
# What only NVIDIA GPUs can tell, in two calls on one of them, and nothing runs beside a timing:
#
#   bench/gpu.sh A [OUT]    405 s: tests/test_cuda.py; GPT-2 124M and MLM base in turn with peers; the loss
#   bench/gpu.sh B [OUT]    325 s: HRM 1b; attention; GB/s of each Triton kernel; what is picked for the loss
#   bench/gpu.sh C [OUT]    200 s: do runs on two GPUs that are killed resume bit for bit? Where there are two
#                           or more, A begins with it and has 180 s more (timeout_s=600).
#
# To prepare, in the root of the repository, what A and B compare with; without it they measure the rest:
#
#   mkdir -p .ab/before .ab/nanogpt && echo /.ab/ >> .git/info/exclude
#   git archive COMMIT | tar x -C .ab/before                     # an older checkout, or set BEFORE=DIR
#   cp NANOGPT/model.py .ab/nanogpt                              # or NANOGPT=DIR; git clone
#                                                                # https://github.com/karpathy/nanoGPT
# On a lent machine, at once one after the other while it is warm, on an H200, since four models in turn take
# 106 GiB; no .git is needed:
#
#   run "bash bench/gpu.sh A $OUT" timeout_s=420 kind=nvidia-h200 carry=[".ab"]
#   run "bash bench/gpu.sh B $OUT" timeout_s=340 kind=nvidia-h200 carry=[".ab"]; then give_back
#
# OUT (bench-gpu) has each number at once: partA.jsonl, partA.log, partA.md (tables with predictions, to be
# committed as a result), partA-*.txt (tests). transformers is a peer where it is installed. PYTHON is the
# interpreter (python3), BUDGET another number of seconds. TRY=1 runs the same on a CPU with tiny shapes.
set -u
cd "$(dirname "$0")/.." || exit 2
part=${1:-} out=${2:-${OUT:-bench-gpu}} python=${PYTHON:-python3} try=${TRY:-}
before=${BEFORE:-.ab/before} nanogpt=${NANOGPT:-.ab/nanogpt}
gpus=$(nvidia-smi --list-gpus 2> /dev/null | grep -c ^GPU) two=""
case $part in
    A) budget=405; [ "$gpus" -lt 2 ] || { two=1 budget=585; } ;;
    B) budget=325 ;;
    C) budget=200 two=1 ;;
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

outcomes = {}
for path in sorted(out.glob(f"part{part}-*.txt")):
    text = path.read_text(errors="replace")
    for outcome, test in re.findall(r"^\[gw\d+\] \[ *\d+%\] ([A-Z]+) (tests/.+?) *$", text, re.M):
        outcomes[test] = outcome
    for test, outcome in re.findall(r"^(tests/.+?) (PASSED|FAILED|ERROR|SKIPPED)", text, re.M):  # no workers
        outcomes[test] = outcome
table("Tests:", ["outcome", "", "tests"], [
    [outcome, len(names), ", ".join(n.rpartition("::")[2] for n in names if outcome in ("FAILED", "ERROR"))]
    for outcome in sorted({*outcomes.values()})
    if (names := [test for test, found in outcomes.items() if found == outcome])])

lines = [json.loads(line) for line in (out / f"part{part}.jsonl").read_text().splitlines()]
runs = {line["command"]: line for line in lines if "contestants" in line}  # the last line of each
rows, kernels = [], []
for command, run in runs.items():
    mode = run["checkpoint_activations"].replace("none", "")
    name = f"{run['model']} {run['size']} {mode}".strip()
    for who, r in run["contestants"].items():
        who = "before" if "--code" in who else who + " --fast" * ("--fast" in shlex.split(command))
        about = [name, f"{run['batch']} x {run['seq_len']}", who]
        if "seconds" not in r:
            rows.append([*about, r.get("error", "cut short before its first round"), *[""] * 14])
            continue
        ratio = next((found["seconds"] for key, found in run["ratios"].items() if key == who
                      or who == "before" and "--code" in key), None)
        cut = f" (cut short after {len(r['rounds'])} rounds)" if run["kind"] == "round" else ""
        rows.append([*about, f"{1000 * r['seconds']:,.1f}{cut}", PREDICTED.get(name, {}).get(who, ""),
                     f"{r['tokens_per_sec']:,.0f}", f"{1000 * r['host']:,.1f}" if r["host"] else "",
                     f"{1000 * r['launching']:,.1f} in {r['launches']:,.0f}" if r.get("launches") else "",
                     f"{r['sm_mhz']:,.0f}" if r.get("sm_mhz") else "",
                     f"{r['watts']:.0f} of {r['watts_limit']:.0f}" if r.get("watts_limit") else "",
                     f"{r['mfu']:.1%}" if r["mfu"] else "", f"{r['gb']:.2f}", f"{r['first_step']:.1f}",
                     f"{r['loss']:.4f}", r["precision"], r.get("attention") or "",
                     "{1:.2f} ({0:.2f} to {2:.2f})".format(*ratio) if ratio else "", r.get("error", "")])
        if "kernels" in r and (who.startswith("ours") or who == "before"):
            kernels.append((f"{name}, batch {run['batch']}, {who}", r["kernels"]))
table("Training, medians of rounds in turn:",
      ["", "batch", "who", "ms a step", "predicted", "tokens/s", "host ms, empty queue", "ms in launches",
       "SM MHz", "W", "MFU", "peak GiB",
       "s to first step", "loss", "precision", "attention", "ours / it", ""], rows)
losses = [line for line in lines if line["kind"] == "loss"]
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
          for r in lines if r["kind"] == "attention"])
moved = re.findall(r"\] ([\d.]+)ms\s+([\d.]+) GB\s+([\d.]+)GB/s\s+(triton\w+)", log)
table("What the Triton kernels of GPT-2 move in a call:", ["kernel", "ms", "GB", "GB/s"], [
    [f"`{kernel}`", ms, gb, speed] for ms, gb, speed, kernel in sorted(moved, key=lambda m: -float(m[0]))])
for title, found in kernels:
    table(f"Kernels of a step of {title}:", ["kernel", "calls", "ms", "share"], [
        [f"`{k['name']}`", f"{k['calls']:g}", f"{k['ms']:.2f}", f"{k['share']:.1%}"] for k in found])
if missing := left.read_text():
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
    if [ "$limit" -lt 15 ]; then left_out "no time for: $command"; return; fi
    echo "== at $SECONDS s, $limit at most: $command" | tee -a "$log"
    BENCH_STEP=$mark timeout -k "${grace:-5}" -s INT "$limit" "$@" >> "$file" 2>&1; code=$?
    sweep "$mark"
    case $code in
        0) ;;
        124 | 137) left_out "cut short after $limit s: $command" ;;
        *) left_out "failed ($code): $command: $(tail -n 1 "$file")" ;;
    esac
    echo "-- at $SECONDS s: $code" >> "$log"
}

tests() {  # SECONDS NAME FLAGS…
    grace=15 TORCHINDUCTOR_CACHE_DIR=$scratch/$2 limited "$1" "$out/part$part-$2.txt" \
        "$python" -m pytest -o addopts= -p no:cacheprovider -v "${@:3}"
}
bench() {  # SECONDS SCRIPT FLAGS…
    TORCHINDUCTOR_CACHE_DIR=${cache:-$scratch/inductor} limited "$1" "$log" \
        "$python" "bench/$2" "${@:3}" --json "$json"
    tables
}
train() { bench "$1" train.py "${@:2}" $few --verbose; }

few="" device="" gpt2=gpt2 large=1b base=base killed=4 others=11 chunks="" old="" nano="" hf=""
nvidia-smi >> "$log" 2>&1
if [ -n "$try" ]; then
    device="--device cpu" gpt2=tiny large=tiny base=tiny killed=1 others=1 chunks="--rows 16384"
    few="$device --no-compile --batch 2 --seq-len 32 --n-layer 1 --steps 1 --pairs 2 --warmup 1"
fi
if [ "$part" = C ]; then :
elif [ -f "$before/bench/train.py" ]; then old="--also=--code $before"
else left_out "the older checkout: there is no $before/bench/train.py"; fi

if [ -n "$two" ]; then
    if [ -n "$try" ]; then
        tests 180 two-gpus --long tests/test_train_gpt2.py -k "killed_run_resumes and changes0-2"
    else
        tests 180 two-gpus tests/test_cuda.py -k two_gpus -n 4
    fi
    tables
fi
if [ "$part" = A ]; then
    rounds="--steps 5 --pairs 5 --warmup 3 --profile 3"
    if [ -f "$nanogpt/model.py" ]; then nano="--peer nanogpt --peer-source $nanogpt"
    else left_out "nanoGPT: there is no $nanogpt/model.py"; fi
    if "$python" -c 'import importlib.util as u; exit(not u.find_spec("transformers"))'; then hf="--peer hf"
    else left_out "transformers: not installed"; fi
    # the resume tests on workers of their own, since one takes as long as all the others
    tests 180 killed tests/test_cuda.py -k killed -n $killed &
    tests 180 others tests/test_cuda.py -k "not killed and not two_gpus" -n $others --dist worksteal &
    wait
    tables
    train 100 gpt2 --size $gpt2 --batch 64 --seq-len 1024 $rounds --also=--fast ${old:+"$old"} $nano
    train 90 mlm --size $base --batch 64 --seq-len 512 $rounds ${old:+"$old"} $hf
    bench 60 kernels.py loss $device $chunks
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
        cache=$scratch/start$start bench 40 kernels.py loss $device --rows 16384
    done
fi
tables
cat "$out/part$part.md"
echo "$SECONDS s; all of it is in $out"
