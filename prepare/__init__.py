"""Turns text into shards of tokens.

    command.py         `python data.py`
    pipeline.py        from a source to a directory of shards
    sources.py         reads documents
    packing.py         packs pairs into rows, writes shards
"""
