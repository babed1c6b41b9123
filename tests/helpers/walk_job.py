"""The job of ``walk_recipe.py`` as a program of its own, for launchers: ``RECIPES_FOLDER [KEY=VALUE ...]``.

It is ``launch.train`` with a recipes folder that a test made, and says its result as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from launch.errors import is_first, status
from launch.prepare import prepare
from megatron_ext.training.run import train


def main() -> int:
    try:
        result = train(prepare(["recipe=walk", *sys.argv[2:]], Path(sys.argv[1])))
    except (Exception, KeyboardInterrupt) as error:
        return status(error)
    if is_first():
        print(json.dumps({"interrupted": result.interrupted, "steps": result.steps, "after": result.success_after}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
