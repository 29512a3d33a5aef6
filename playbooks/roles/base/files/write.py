"""Makes directories and files as they were asked for, in one round trip.

stdin: JSON {"folders": [{"path", "owner"}, ...], "files": [{"path", "mode", "text"}, ...]}. A file
is there whole or not at all.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any


def main(asked: dict[str, Any]) -> None:
    for folder in asked["folders"]:
        place = Path(folder["path"])
        place.mkdir(parents=True, exist_ok=True)
        shutil.chown(place, folder["owner"], folder["owner"])
        place.chmod(0o755)
    for file in asked["files"]:
        place = Path(file["path"])
        place.parent.mkdir(parents=True, exist_ok=True)
        # sysctl.d, apt.conf.d and the like read no file whose name begins with a dot.
        part = place.with_name(f".{place.name}.part")
        part.write_text(file["text"], encoding="utf-8")
        part.chmod(int(file["mode"], 8))
        part.replace(place)


if __name__ == "__main__":
    main(json.load(sys.stdin))
