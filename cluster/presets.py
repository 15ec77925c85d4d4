"""--list-presets: the recipes of a trainer and the command for each."""


def list_presets(presets: dict[str, tuple], recipes: dict[str, dict]):
    """Prints `presets` of train_mlm.py, (GPUs, use case, size, changes to it) by name, whose `recipes` are
    their rows of flags.
    """
    print(f"{'preset':20} {'layers':>6} {'heads':>6} {'width':>6} {'batch':>6} {'length':>9} {'lr':>6}  "
          "use case")
    commands = []
    for name, (gpus, use, size, _) in presets.items():
        row = recipes[name]
        length = f"{row['epochs']} epochs" if "epochs" in row else f"{row['steps']} st."
        print(f"{name:20} {row['n_layer']:6} {row['n_head']:6} {row['d_model']:6} {row['global_batch']:6} "
              f"{length:>9} {row['lr']:6g}  {use}")
        source = " --data imdb" if size == "tiny" else ""  # larger sizes need more data: FineWeb-Edu
        commands.append(f"torchrun --nproc_per_node={gpus} train_mlm.py --preset {name}{source}")
    print("\nThe narrow ones have the learning rate, warm-up and context of --size tiny, tuned for its width "
          "of 128, the others\nthose of their size: --lr and --warmup change them.\n")
    print(*commands, sep="\n")
