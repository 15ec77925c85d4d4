"""Turns text into shards of tokens.

    command.py         `python data.py`
    pipeline.py        from a source to a directory of shards
    sources.py         reads documents
    tokenizer.py       text to ids and back
    tokenizer_json.py  runs tokenizers that other programs wrote
    bpe.py             trains a tokenizer
    packing.py         packs pairs into rows, writes shards

On prepared data, a trainer uses only the tokenizers, to write samples.
"""
