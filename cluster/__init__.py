"""roll_call.py is imported for runs on several nodes, late.py with --comm late. The first also runs as a
script, without torch.
"""
