"""What is made of a run beside train.log and metrics.jsonl: tensorboard.py (tb/), wandb.py (--wandb),
picture.py (training_history.png and history.json), levels.py (levels.png), machine.py (curves of CPU, memory
and GPUs), start.py (what a run prints at its start, and what gets its records). command.py is `python
monitor.py`. RunLog of monitor.py writes the log itself, and step_line there the line of a step;
log.step(…, NAME=value) in a trainer adds a number.
"""
