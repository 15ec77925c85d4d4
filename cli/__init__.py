"""The command line.

errors.py: how a command ends. parser.py: help, types of flags and hints. flags.py: the flags that all
trainers share. run.py: which run a command means, and which flags may change when it resumes. run.py imports
the other folders, which import the rest of cli/. Steps, evaluation, checkpoints and Ctrl-C are in
ddp_utils.py.
"""
