"""Several processes: heartbeat.py (which one is lost), diagnosis.py (what an error means), memory.py
(--dry-run), late.py (--comm late); roll_call.py gathers several nodes, and runs as a script, too, without
torch. Without the folder a process that is lost is not named, and these two flags are refused.
"""
