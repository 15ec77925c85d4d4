"""Runs a script as a node that has a working directory of its own: on_node.py SCRIPT [DIRECTORIES] FLAGS"""

import json
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    _, script, directories, *flags = sys.argv
    os.environ |= {"GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"],
                   "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    os.chdir(json.loads(directories)[int(os.environ["RANK"])])
    sys.argv = [script, *flags]
    runpy.run_path(str(Path(__file__).parents[2] / script), run_name="__main__")
