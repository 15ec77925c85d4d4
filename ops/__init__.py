"""Faster versions of what model.py computes, and what only some flags need.

    attention.py            bfloat16 attention on CPUs
    cross_entropy.py        the loss and its gradients in one pass
    adam_atan2.py           --optimizer adam-atan2; make_optimizers in model.py chooses it
    ema.py                  --ema
    documents.py            where the documents of a row begin and end
    device.py               settings of the process, and what a device can do

attention.py and cross_entropy.py differ from the plain computation only in the last bits.
"""
