"""What a plain run does without: attention.py (bfloat16 on CPUs) and cross_entropy.py, fast forms of what
model.py has plainly, with other last bits; flash_attention_4.py; adam_atan2.py (--optimizer adam-atan2) and
ema.py (--ema). make_optimizers in model.py chooses the optimizer.
"""
