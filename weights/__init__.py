"""Weights that enter and leave a run. (Its own checkpoints are in ddp_utils.py.)

    init_from.py    --init-from, load_frozen
    use.py          --prompt, --chat, --fill, --export, --eval-only, load_run
    sampling.py     generates text, fills masks
    huggingface.py  reads and writes models of transformers
    llama_cpp.py    writes GGUF
    card.py         writes the model card of an export
"""
