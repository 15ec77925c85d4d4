"""Tokenizers.

    vocabulary.py     the ids of a tokenizer, all that training on shards needs of it
    tokenizer.py      text to ids and back
    tokenizer_json.py runs tokenizers that other programs wrote
    bpe.py            trains a tokenizer
"""
