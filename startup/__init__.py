"""From the command line to the first step.

    run.py        which run a command means, and what it needs: find_run to start_run, end_run
    resume.py     what a run keeps when it resumes, what it takes, and what it refuses
    plan.py       the batches and loggers of a run, and what it shows at its start and at its end
    directory.py  the name, lock and files of its directory, with the copy of its code
    dry_run.py    --dry-run: how much memory each process would need
"""
