"""Checks what other programs make of the exports: each cell compares one with --prompt or --fill.

    pip install transformers peft gguf xllamacpp && python bench/exports.py
    python bench/exports.py HRM MLM            # these rows only: GPT-2, --modern, HRM, MLM and cost

The models are random and small. A share counts prompts with the same text. A difference is the largest one of
a logit (transformers, also with a merged LoRA of peft and back by --init-from) or of a log-probability
(llama.cpp, without its flash attention). The second table compares what a modern and a plain GPT-2 of the
same width cost in llama.cpp: bytes / 4 for each parameter, and tokens a second.
"""

import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

try:
    import gguf  # noqa: F401
    import peft
    import transformers
    import xllamacpp  # noqa: F401
except ImportError as error:
    sys.exit(f"error: {error}: pip install transformers peft gguf xllamacpp")

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("", "helpers", "weights"))]

from model import GPT2, HRM, MLM, num_params, pad_vocab  # noqa: E402
from vocab.tokenizer import load_tokenizer  # noqa: E402
from weights.huggingface import from_hf, to_hf  # noqa: E402
from weights.llama_cpp import to_gguf  # noqa: E402
from weights.sampling import fill_masks, samples_of  # noqa: E402

SHAPE = {"n_layer": 2, "n_head": 2, "d_model": 64, "seq_len": 96}
MODELS = {"GPT-2": (GPT2, {}), "--modern": (GPT2, {"modern": True}),
          "HRM": (HRM, {"ff": 128, "h_cycles": 2, "l_cycles": 1}), "MLM": (MLM, {"ff": 96, "window": 16})}
PROMPTS = ["def main(self):", "a", "the cat sat on the mat", "to be or not", "x = [1, 2, 3]", "I", "we ", "1"]
MASKED = ["the [MASK] sat", "[MASK] is here", "I am [MASK]", "to [MASK] or not to [MASK]"]


def made(kind: type, tokenizer, **changes):
    ids = tokenizer.num_ids if kind is MLM else tokenizer.vocab_size
    shape = SHAPE | changes | ({"eot": tokenizer.eot} if kind is MLM else {})
    model = kind(kind.Config(vocab_size=ids, padded_vocab=pad_vocab(ids), **shape)).eval()
    torch.manual_seed(0)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.08)
    if kind is not MLM:  # letters only, because llama.cpp's server joins the bytes of a character
        head = model.head_weight
        head.data[:32] = head.data[127:] = 0
    return model


def written(model, tokenizer, prompt: str) -> str:
    sampling = SimpleNamespace(max_new_tokens=12, temperature=0, top_k=0, seed=0, condition="")
    return "".join(samples_of(model, tokenizer, "cpu", prompt, sampling)[0])


def share(found: list, wanted: list) -> str:
    return f"{sum(a == b for a, b in zip(found, wanted, strict=True))} of {len(wanted)}"


@torch.no_grad()
def largest(a: torch.Tensor, b: torch.Tensor) -> str:
    return f"{(a - b).abs().max().item():.1e}"


def merged(directory: Path, kind: type, theirs, idx) -> str:
    """Reads a LoRA of random weights that peft has merged and saved."""
    adapted = peft.get_peft_model(theirs, peft.LoraConfig(target_modules="all-linear", r=4))
    for name, p in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(p, std=0.05)
    whole = adapted.merge_and_unload()
    whole.save_pretrained(directory)
    with torch.no_grad():
        return largest(from_hf(kind, directory).eval()(idx)[..., :whole.config.vocab_size], whole(idx).logits)


def llama(model, tokenizer, path: Path) -> str:
    from test_llama_cpp import GREEDY, ask, expected
    to_gguf(model, path, tokenizer)
    prompts = [[tokenizer.eot, *tokenizer.encode(prompt).tolist()] for prompt in PROMPTS]
    answers = ask(path, *(("completions", {"prompt": ids, "max_tokens": 8, "logprobs": 1} | GREEDY)
                          for ids in prompts))
    worst = 0.0
    for answer, ids in zip(answers, prompts):
        new, log_p = expected(model, ids, 8)
        found = answer["choices"][0]["logprobs"]["content"]
        if [token["id"] for token in found] != new:
            return "other ids"
        worst = max(worst, *(abs(token["logprob"] - p) for token, p in zip(found, log_p)))
    return f"{worst:.1e}"


def row(name: str, directory: Path) -> list[str]:
    kind, changes = MODELS[name]
    tokenizer = load_tokenizer("bytes")
    model = made(kind, tokenizer, **changes)
    to_hf(model, directory / "hf", tokenizer)
    words = transformers.AutoTokenizer.from_pretrained(directory / "hf")
    idx = torch.randint(250, (2, 60))
    back = largest(from_hf(kind, directory / "hf").eval()(idx), model(idx))
    if kind is MLM:
        theirs = transformers.AutoModelForMaskedLM.from_pretrained(directory / "hf").eval()
        pipe = transformers.pipeline("fill-mask", model=theirs, tokenizer=words, top_k=1)
        wanted = [[line.split("  ")[0].split("'")[1] for line in fill_masks(model, tokenizer, text)]
                  for text in MASKED]
        filled = []
        for text in MASKED:
            masks = pipe(text) if text.count("[MASK]") > 1 else [pipe(text)]
            filled.append([repr(tokenizer.decode([best["token"]]))[1:-1] for best, in masks])
        lora = merged(directory / "lora", kind, theirs, idx)
        return [name, "–", "–", share(filled, wanted), "–", lora, back]
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory / "hf").eval()
    wanted = [written(model, tokenizer, prompt) for prompt in PROMPTS]

    def generated(batch: list[str]) -> list[str]:
        given = words(batch, return_tensors="pt", padding=True)
        new = theirs.generate(**given, max_new_tokens=12, do_sample=False)[:, given["input_ids"].size(1):]
        return words.batch_decode(new, skip_special_tokens=True)
    pipe = transformers.pipeline("text-generation", model=theirs, tokenizer=words)
    piped = [found[0]["generated_text"] for found in pipe(
        PROMPTS, batch_size=4, max_new_tokens=12, do_sample=False, return_full_text=False)]
    single = [generated([prompt])[0] for prompt in PROMPTS]
    return [name, share(single, wanted), share(generated(PROMPTS), wanted), share(piped, wanted),
            llama(model, tokenizer, directory / "model.gguf"),
            merged(directory / "lora", kind, theirs, idx), back]


def cost(directory: Path):
    """Prints size and speed of files for llama.cpp with 12 blocks of 768 channels."""
    from test_llama_cpp import GREEDY, ask
    tokenizer = load_tokenizer("bytes")
    request = {"prompt": [65] * 16, "max_tokens": 40, "ignore_eos": True} | GREEDY
    for name in ("GPT-2", "--modern"):
        model = made(GPT2, tokenizer, n_layer=12, n_head=12, d_model=768, **MODELS[name][1])
        path = directory / "cost.gguf"
        to_gguf(model, path, tokenizer)
        answers = ask(path, *[("completions", request)] * 3)
        speed = max(answer["timings"]["predicted_per_second"] for answer in answers)
        print(f"{name:10}{path.stat().st_size / 4 / num_params(model):6.3f}{speed:8.1f} tokens/s of "
              f"{num_params(model) / 1e6:.1f} M parameters")


def main():
    rows = sys.argv[1:] or [*MODELS, "cost"]
    if unknown := {*rows} - {*MODELS, "cost"}:
        sys.exit(f"error: unknown row {min(unknown)}: choose from {', '.join(MODELS)} and cost.")
    titles = ("", "generate", "batch of 8", "pipeline", "llama.cpp", "peft, back", "back")
    print("".join(f"{title:>12}" for title in titles))
    with tempfile.TemporaryDirectory() as directory:
        for number, name in enumerate(rows):
            if name != "cost":
                print("".join(f"{cell:>12}" for cell in row(name, Path(directory, str(number)))), flush=True)
        if "cost" in rows:
            cost(Path(directory))


if __name__ == "__main__":
    main()
