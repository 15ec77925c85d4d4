"""What enters and leaves a run: huggingface.py and llama_cpp.py (files of other programs), init_from.py (what
a run starts from), use.py (--prompt, --chat, --fill, --export, --eval-only), sampling.py (text
that a model writes). A run's own checkpoints are in ddp_utils.py.
"""
