"""What only some runs import. roll_call.py also runs as a script, without torch."""
