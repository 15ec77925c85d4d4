"""roll_call.py is imported for runs on several nodes. It also runs as a script, without torch."""
