"""The command line: errors.py (how a command ends), parser.py (types of flags and help), flags.py (those that
all trainers share), run.py (the run that a command means). run.py lies above other folders, the rest below.
"""
