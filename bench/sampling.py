"""How fast does a model write one text, or eight at once? Compares ours with its export in transformers.

    python bench/sampling.py [ROUNDS]     # default: 5; random models in float32, most with the ids of GPT-2
    python bench/sampling.py 1 --models HRM --tokenizer bytes

Prints for each model the tokens per second of one text, and how many times as many it has with eight texts:
median of the rounds (lowest to highest). The prompt has one token, so all of this is decoding.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from model import GPT2, HRM, pad_vocab
from vocab.tokenizer import load_tokenizer
from weights.huggingface import to_hf
from weights.sampling import generate

SIZES = {"GPT-2, 4 x 128, 4,096 ids": (GPT2, {"n_layer": 4, "n_head": 2, "d_model": 128, "vocab_size": 4096}),
         "GPT-2, 4 x 128": (GPT2, {"n_layer": 4, "n_head": 2, "d_model": 128}),
         "GPT-2, 12 x 768": (GPT2, {"n_layer": 12, "n_head": 12, "d_model": 768}),
         "HRM, 2 x 2 x 128": (HRM, {"n_layer": 2, "n_head": 2, "d_model": 128, "ff": 256})}
LENGTH = 96
SAMPLING = {"temperature": 0.8, "top_k": 50}


def per_second(write, texts: int) -> float:
    begun = time.perf_counter()
    write(texts)
    return texts * LENGTH / (time.perf_counter() - begun)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rounds", type=int, nargs="?", default=5, help="rounds to time, after a warm-up (5)")
    parser.add_argument("--models", default="", metavar="WORD",
                        help=f"only models with this word: {'; '.join(SIZES)}")
    parser.add_argument("--tokenizer", default="gpt2", help="most models have its ids (gpt2)")
    args = parser.parse_args()
    import transformers
    transformers.utils.logging.set_verbosity_error()
    tokenizer = load_tokenizer(args.tokenizer)
    print(f"{torch.get_num_threads()} threads, vocabulary {tokenizer.vocab_size:,}")
    for name, (kind, shape) in SIZES.items():
        if args.models not in name:
            continue
        torch.manual_seed(0)
        ids = shape.get("vocab_size", tokenizer.vocab_size)
        c = kind.Config(seq_len=256, padded_vocab=pad_vocab(ids), start=0, **{"vocab_size": ids} | shape)
        model = kind(c).eval()
        prompt = torch.tensor([[0]])
        theirs = None
        if ids == tokenizer.vocab_size:
            with tempfile.TemporaryDirectory() as directory:
                to_hf(model, directory, tokenizer)
                theirs = transformers.AutoModelForCausalLM.from_pretrained(directory).eval()

        def ours(texts, model=model, prompt=prompt):
            for _ in generate(model, prompt, LENGTH, **SAMPLING, num_samples=texts):
                pass

        def peer(texts, model=theirs, prompt=prompt):
            model.generate(prompt, max_new_tokens=LENGTH, min_new_tokens=LENGTH, do_sample=True,
                           num_return_sequences=texts, **SAMPLING)

        writers = {"ours": ours, "transformers": peer} if theirs else {"ours": ours}
        found = {who: [] for who in writers}
        for _ in range(args.rounds + 1):  # the first warms up
            for who, write in writers.items():
                found[who].append((per_second(write, 1), per_second(write, 8)))
        print(name)
        for who, speeds in found.items():
            ratios = sorted(eight / one for one, eight in speeds[1:])
            one = statistics.median(one for one, _ in speeds[1:])
            print(f"  {who:12} {one:8.1f} tokens/s, eight texts {statistics.median(ratios):.2f} times as "
                  f"many ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


if __name__ == "__main__":
    main()
