"""Tokenizers that other programs wrote: a tokenizer.json, or a vocab.json with merges.txt."""

import json
from collections import Counter
from pathlib import Path

import numpy as np

from cli.errors import UserError
from prepare.packages import needed
from prepare.vocabulary import EOT, MASK, MASKS, Vocabulary, ends_in, without_surrogates


class HuggingFaceTokenizer(Vocabulary):
    """Any tokenizer.json that tokenizer.py did not write, run by the `tokenizers` package."""

    def __init__(self, name: str, text: str):
        with needed("tokenizers", f"the tokenizer {name}"):
            import tokenizers
        self._tokenizer = package = tokenizers.Tokenizer.from_str(text)
        package.encode_special_tokens = True  # "</s>" inside a text is text like any other
        package.no_truncation()
        package.no_padding()
        if hasattr(package.model, "dropout"):  # with which a text has other ids each time
            package.model.dropout = None
        vocab = package.get_vocab()
        spec = json.loads(text)
        for names in (ends_in(spec), MASKS):
            package.add_special_tokens([next((s for s in names if s in vocab), names[0])])
        vocab = package.get_vocab()
        declared = {token["content"]: token["id"] for token in spec["added_tokens"]}
        if len({*vocab.values()}) < len(vocab) or vocab != vocab | declared:  # tokenizers fills gaps
            raise UserError(f"the ids of {name} have gaps, so that special tokens would get those of others: "
                            "number its tokens from 0 without gaps.")
        ours = package.to_str()
        super().__init__(name, json.loads(ours), ours)
        unknown = spec["model"].get("unk_id", vocab.get(spec["model"].get("unk_token")))
        for special in self.specials:
            if {*self.encode(f"{special} a{special}a").tolist()} & {*self.specials.values()} - {unknown}:
                raise UserError(f"{name} encodes the text {special} to a special id, so a text could forge "
                                "the end of a document: use another tokenizer, such as gpt2 or bpe:N.")
        text = "So  it is, isn't\nit?"  # of which some lose blanks, or put one before it
        ids = self.encode(text)
        same = self.decode(ids).strip() == text
        self.exact = same and self.token_bytes[ids].sum() - len(text) in (0, 1)

    def letters(self, text: str) -> Counter:
        """The characters of a text as its normalizer has them, without white space and SentencePiece's
        mark for it.
        """
        if normalizer := self._tokenizer.normalizer:
            text = normalizer.normalize_str(text)
        return Counter("".join(text.replace("\u2581", " ").split()))

    def lost_in(self, text: str, ids: np.ndarray, split: str) -> Counter:
        """How many `letters` of a text there are in `all`, and how many are `lost` in its ids, to which
        special ones may be added. Also the bytes of the text, and those that its tokens seem to have, which
        some do not spell, for each split.
        """
        text = without_surrogates(text)
        wanted = self.letters(text)
        # normalized, too, because a decoder may take back what the normalizer did, such as a mark for a blank
        found = self.letters(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        return Counter({"all": wanted.total(), "lost": (wanted - found).total(),
                        f"{split}_bytes": len(text.encode()),
                        f"{split}_tokens": int(self.token_bytes[ids].sum())})

    def encode(self, text: str) -> np.ndarray:
        # unlike `encode`, this releases Python's lock; a batch of one text takes one core
        encoding, = self._tokenizer.encode_batch([without_surrogates(text)], add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    def encode_masked(self, text: str) -> list[int]:
        """As an export does it: the parts between masks are no texts of their own, before which some
        tokenizers put a blank, and the mask takes all white space before it.
        """
        import tokenizers
        whole = tokenizers.Tokenizer.from_str(self.to_json())
        whole.add_special_tokens([tokenizers.AddedToken(self.mask_token, lstrip=self.takes_blank)])
        return whole.encode(text.replace(MASK, self.mask_token), add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)


def text_of_merges(name: str) -> str:
    """The tokenizer.json of GPT-2's older form in the directory `name`: vocab.json, merges.txt and, if tokens
    were added, added_tokens.json. Of these, those that special_tokens_map.json names are special.
    """
    merges = Path(name, "merges.txt")
    with needed("tokenizers", f"the tokenizer {name}"):
        from tokenizers import AddedToken, ByteLevelBPETokenizer
    try:
        old = ByteLevelBPETokenizer(str(merges.with_name("vocab.json")), str(merges))
        added, special = (json.loads(path.read_text("utf-8")) if path.is_file() else {} for path in map(
            merges.with_name, ("added_tokens.json", "special_tokens_map.json")))
        for token in sorted(added, key=added.get):
            old.add_tokens([AddedToken(token, special=json.dumps(token) in json.dumps(special))])
        if added.items() - old.get_vocab().items():
            raise ValueError("the ids of added_tokens.json have to follow those of vocab.json without gaps")
    except Exception as error:  # tokenizers raises bare Exception
        raise UserError(f"{merges} and the .json files beside it cannot be read by tokenizers: {error}.")
    if EOT in old.get_vocab():
        old.add_special_tokens([EOT])
    return old.to_str()
