"""From the command line to the first step.

    run.py        which run a command means, and what it needs: find_run to start_run, end_run
    plan.py       what a run shows at its start and at its end
    dry_run.py    --dry-run: how much memory each process would need
"""
