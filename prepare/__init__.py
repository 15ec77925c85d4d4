"""Text becomes shards of tokens: sources.py (documents), tokenizer.py (text to ids and back), bpe.py (trains
a tokenizer), packing.py (pairs in rows, shards), pipeline.py (all together), command.py (`python data.py`).
tokenizer_json.py runs the tokenizers of other programs. A trainer needs none of it for what was prepared,
but for samples.
"""
