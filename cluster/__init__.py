"""Several processes: heartbeat.py (which one is lost), diagnosis.py (what an error means), dry_run.py
(--dry-run), late.py (--comm late); roll_call.py gathers several nodes, and runs as a script, too, without
torch.
"""
