"""Everything a run shows, except the log itself:

    tensorboard.py, wandb.py    curves: tb/ and --wandb
    picture.py                  training_history.png and history.json
    machine.py, mfu.py          CPU, memory and GPUs; the share of a GPU's peak
    command.py                  `python monitor.py`

RunLog in monitor.py writes train.log and metrics.jsonl. `log.step(…, NAME=value)` in a trainer adds a number.
"""
