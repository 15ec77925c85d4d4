"""The ground floor, which all others import.

    errors.py    how a command fails, and access to files and packages
    files.py     files that survive a crash, locks, JSON, digests
    parser.py    help, types of flags and hints
    flags.py     the flags that all trainers share
"""
