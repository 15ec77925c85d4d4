"""Runs tokenizers that other programs wrote as a tokenizer.json."""

import json
from collections import Counter

import numpy as np

from cli.errors import UserError, needed
from cli.files import without_surrogates
from vocab.vocabulary import MASK, MASKS, Vocabulary, ends_in


class HuggingFaceTokenizer(Vocabulary):
    """Any tokenizer.json that is not a `byte_level_bpe` of tokenizer.py, run by the package tokenizers.
    Raises UserError if its ids have gaps, or if a plain text could encode to a special id.
    """

    def __init__(self, name: str, text: str):
        with needed("tokenizers", f"the tokenizer {name}"):
            import tokenizers
        self._tokenizer = package = tokenizers.Tokenizer.from_str(text)
        package.encode_special_tokens = True  # so that "</s>" inside a text is text like any other
        package.no_truncation()
        package.no_padding()
        if hasattr(package.model, "dropout"):  # would encode a text differently each time
            package.model.dropout = None
        vocab = package.get_vocab()
        spec = json.loads(text)
        for names in (ends_in(spec), MASKS):
            package.add_special_tokens([next((s for s in names if s in vocab), names[0])])
        vocab = package.get_vocab()
        declared = {token["content"]: token["id"] for token in spec["added_tokens"]}
        if len({*vocab.values()}) < len(vocab) or vocab != vocab | declared:  # tokenizers fills gaps
            raise UserError(f"the ids of {name} have gaps, so special tokens would get the ids of others: "
                            "number its tokens from 0 without gaps.")
        ours = package.to_str()
        super().__init__(name, json.loads(ours), ours)
        unknown = spec["model"].get("unk_id", vocab.get(spec["model"].get("unk_token")))
        for special in self.specials:
            if {*self.encode(f"{special} a{special}a").tolist()} & {*self.specials.values()} - {unknown}:
                raise UserError(f"{name} encodes the text {special} to a special id, so a text could forge "
                                "the end of a document: use another tokenizer, such as gpt2 or bpe:N.")
        text = "So  it is, isn't\nit?"  # some tokenizers lose spaces here, or put one in front
        ids = self.encode(text)
        same = self.decode(ids).strip() == text
        self.exact = same and self.token_bytes[ids].sum() - len(text) in (0, 1)

    def letters(self, text: str) -> Counter:
        """How often a normalized text has each character, apart from white space and the mark that
        SentencePiece uses for it.
        """
        if normalizer := self._tokenizer.normalizer:
            text = normalizer.normalize_str(text)
        return Counter("".join(text.replace("\u2581", " ").split()))

    def lost_in(self, text: str, ids: np.ndarray, split: str) -> Counter:
        """Counts what encoding a text as `ids` loses; `ids` may include special ones. `all` counts the
        `letters` of the text, and `lost` the letters that decoding does not give back. SPLIT_bytes counts the
        bytes of the text, and SPLIT_tokens the bytes that its tokens spell. These can differ, because some
        tokens do not spell their text.
        """
        text = without_surrogates(text)
        wanted = self.letters(text)
        # normalize this as well: a decoder may undo what the normalizer did, such as a mark for each space
        found = self.letters(self._tokenizer.decode(ids.tolist(), skip_special_tokens=True))
        return Counter({"all": wanted.total(), "lost": (wanted - found).total(),
                        f"{split}_bytes": len(text.encode()),
                        f"{split}_tokens": int(self.token_bytes[ids].sum())})

    def encode(self, text: str) -> np.ndarray:
        # unlike `encode`, this releases the GIL; a batch of one text uses one core
        encoding, = self._tokenizer.encode_batch([without_surrogates(text)], add_special_tokens=False)
        return np.array(encoding.ids, np.uint32)

    def encode_masked(self, text: str) -> list[int]:
        """The ids of a text, with the mask id for each [MASK], as an export encodes it. The text is encoded
        as a whole, because some tokenizers put a space in front of a text and would put one in front of each
        part between masks. If tokens include the space before their word, the mask replaces all white space
        before it.
        """
        import tokenizers
        whole = tokenizers.Tokenizer.from_str(self.to_json())
        whole.add_special_tokens([tokenizers.AddedToken(self.mask_token, lstrip=self.takes_blank)])
        return whole.encode(text.replace(MASK, self.mask_token), add_special_tokens=False).ids

    def decode(self, ids) -> str:
        return self._tokenizer.decode([int(i) for i in ids], skip_special_tokens=False)
