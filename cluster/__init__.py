"""Several processes.

    heartbeat.py    which one is lost
    diagnosis.py    what an unforeseen error means
    late.py         --comm late
    roll_call.py    gathers several nodes; it's also a script, without torch
"""
