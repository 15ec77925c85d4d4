"""A model in training.

    strategies.py   how it is laid out over ranks and how it computes: sharding, DDP, precision, compiling
    step.py         TrainState: clips gradients, steps the optimizers, yields the tensors of a checkpoint
    evaluation.py   the losses of the validation sets
"""
