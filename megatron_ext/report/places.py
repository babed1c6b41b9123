"""What a page says of places: enough to find a folder again, nothing of the machine that it lies on. Pure.

Invariants (``tests/report/test_places.py`` asserts each):

1. Of an absolute path only its last part is left, in a value, a list of them, and the words of a command. What is none
   (relative paths, URLs, slashes in a sentence) stays as it was.
2. Folders are told by the shortest ends of their paths that are different.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path

# An absolute path of two parts or more, at the start of a text or behind what may stand before a value.
_ABSOLUTE = re.compile(r"(?<![^='\"\[,(:])(?:~|/[^\s/'\",\])]+)(?:/[^\s/'\",\])]+)*/([^\s/'\",\])]+)/?")
_URL = re.compile(r"[a-z][a-z0-9+.-]*://")


def without_machine(text: str) -> str:
    """A value with ``…/name`` for every absolute path in it."""
    return text if _URL.search(text) else _ABSOLUTE.sub(r"…/\1", text)


def command_line(words: Sequence[str]) -> str:
    """A command as it can be typed, ``python`` for the interpreter that ran it."""
    if not words:
        return ""
    first = "python" if Path(words[0]).name.startswith("python") else without_machine(words[0])
    return shlex.join([first, *map(without_machine, words[1:])])


def place(folder: Path) -> str:
    """A folder as it is found from here; of one that lies elsewhere the last two parts."""
    here = folder.resolve()
    if here.is_relative_to(Path.cwd()):
        return str(here.relative_to(Path.cwd()))
    return "/".join(("…", *here.parts[-2:]))


def ends(folders: Sequence[Path]) -> list[str]:
    """The folders' names, with as many of the parts before them as tell all of them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for count in range(1, max(map(len, parts), default=1) + 1):
        found = ["/".join(one[-count:]) for one in parts]
        if len(set(found)) == len(set(parts)):
            return found
    return [str(folder) for folder in folders]
