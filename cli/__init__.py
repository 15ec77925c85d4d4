"""The command line: errors.py (how a command ends), parser.py (types of flags and help), flags.py (those that
all trainers share), run.py (the run that a command means, and which flags may change when it resumes). run.py
lies above other folders, the rest below. Steps, evaluation, checkpoints and Ctrl-C are in ddp_utils.py.
"""
