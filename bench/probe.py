"""Measures what an encoder's features are worth, with a linear classifier of texts on frozen features.

    python train_mlm.py --export
    python bench/probe.py runs/mlm-tiny-stdlib-bpe4096/hf labelled.jsonl
    python bench/probe.py answerdotai/ModernBERT-base labelled.jsonl    # any encoder that transformers loads

Each line of the file is a JSON object with text and label. A hash picks a fifth of the texts for the test.
Also measures an encoder with random weights, and a bag of the trained embeddings.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path

import torch


def read_labelled(path: Path) -> tuple[list[str], list[str]]:
    """(texts, labels). Exits with a sentence if the file is not what it should be."""
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")  # splitlines() would cut at U+2028, too
        rows = [json.loads(line) for line in lines if line.strip()]
        texts, labels = [row["text"] for row in rows], [row["label"] for row in rows]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text that is no string")
        if not all(isinstance(label, str | int | float) and label == label for label in labels):
            raise TypeError("a label that is no string, number, true or false")
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"error: {path} has no lines of JSON with text and label ({error!r}).")
    return texts, [str(label) for label in labels]


@torch.no_grad()
def features(model, rows: list[torch.Tensor], embeddings_only: bool = False) -> torch.Tensor:
    """Mean over the tokens of each row (1, T) of the last hidden states, or of the embeddings: (rows, C)."""
    def states(row):
        return model.get_input_embeddings()(row) if embeddings_only else model(row).last_hidden_state
    return torch.cat([states(row).float().mean(dim=1) for row in rows])


def probe_accuracy(x: torch.Tensor, y: torch.Tensor, test: torch.Tensor) -> float:
    """Accuracy on the test rows of a logistic regression that was fitted to the others. x (N, C), y (N,)."""
    mean, std = x[~test].mean(dim=0), x[~test].std(dim=0) + 1e-6
    x = (x - mean) / std
    weight = torch.zeros(x.size(1) + 1, int(y.max()) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight], max_iter=200, line_search_fn="strong_wolfe")

    def closure():
        optimizer.zero_grad()
        logits = x[~test] @ weight[1:] + weight[0]
        loss = torch.nn.functional.cross_entropy(logits, y[~test]) + 1e-3 * weight[1:].square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return ((x[test] @ weight[1:] + weight[0]).argmax(dim=1) == y[test]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a directory that train_mlm.py --export wrote, or one of the hub")
    parser.add_argument("labelled", type=Path, help="JSON lines with text and label")
    args = parser.parse_args()
    texts, labels = read_labelled(args.labelled)
    names = sorted(set(labels))
    y = torch.tensor([names.index(label) for label in labels])
    test = torch.tensor([int(hashlib.sha256(text.encode()).hexdigest(), 16) % 5 == 0 for text in texts])
    if len(names) < 2 or test.all() or not test.any():
        sys.exit(f"error: {args.labelled} needs two labels or more, with some dozens of texts each.")
    try:
        from transformers import AutoModel, AutoTokenizer
        model, tokenizer = (auto.from_pretrained(args.model) for auto in (AutoModel, AutoTokenizer))
    except (ImportError, OSError, ValueError) as error:
        sys.exit(f"error: {args.model} cannot be loaded by transformers: {str(error).splitlines()[0]}")
    torch.manual_seed(0)
    untrained = AutoModel.from_config(model.config).eval()
    longest = model.config.max_position_embeddings
    start = [] if tokenizer("")["input_ids"] or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    rows = [torch.tensor([(start + tokenizer(text)["input_ids"])[:longest]]) for text in texts]
    print(f"{len(y)} texts, {len(names)} labels, {int(test.sum())} texts to test on; the most frequent "
          f"label: {y[test].bincount().max() / test.sum():.1%}")
    for what, x in (("trained encoder", features(model.eval(), rows)),
                    ("random encoder", features(untrained, rows)),
                    ("bag of trained embeddings", features(model, rows, embeddings_only=True))):
        print(f"{what}: {probe_accuracy(x, y, test):.1%}", flush=True)


if __name__ == "__main__":
    main()
