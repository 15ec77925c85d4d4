"""Several processes: heartbeat.py says which one is lost, diagnosis.py what an error means. dry_run.py is
--dry-run, late.py is --comm late. roll_call.py gathers several nodes; it's also a script, without torch.
"""
