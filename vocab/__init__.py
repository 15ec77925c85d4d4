"""Tokenizers: their ids (vocabulary.py), encoding and decoding (tokenizer.py, tokenizer_json.py), training (bpe.py)."""
