"""What a run that starts from trained weights takes from the sizes of its trainer."""

import math


def nearest_size(sizes: dict[str, dict], record: dict) -> str:
    """The size that the record of weights names, or the first of those that differ from it in the fewest
    fields.
    """
    config = record["model_config"]
    size = record["settings"].get("size")
    unlike = {name: sum(row.get(key, config[key]) != config[key] for key in config)
              for name, row in sizes.items()}
    return size if size in sizes else min(unlike, key=unlike.get)


def gentler(row: dict) -> dict:
    """Where a run that continues from trained weights departs from the row of its size."""
    batch = min(32, row["global_batch"])
    eval_batches = math.ceil(row["eval_batches"] * batch / row["global_batch"])
    return {"lr": 3e-5, "warmup": 0, "epochs": 3, "eval_every": 50, "save_every": 50, "global_batch": batch,
            "eval_batches": eval_batches, "schedule": "cosine", "ema": min(0.999, row.get("ema", 0.0))}
