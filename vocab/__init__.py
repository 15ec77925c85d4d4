"""Tokenizers.

    vocabulary.py                      the ids of a tokenizer
    tokenizer.py, tokenizer_json.py    encoding and decoding
    bpe.py                             training
"""
