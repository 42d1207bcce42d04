"""Put Chromium into .venv, for the tests of pages and for pictures of them.

    python scripts/install_chromium.py

A Chromium on PATH is used as it is. `make` calls this.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from debian_packages import run, unpack_packages

ROOT = Path(__file__).resolve().parent.parent
LAUNCHER = ROOT / ".venv" / "chromium" / "chromium"
NAMES = ("chromium", "chromium-browser", "google-chrome")
TIMEOUT_S = 300
#: Starts the unpacked browser, whose libraries lie beside it.
SCRIPT = """#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/unpacked
libraries=$(find "$root/usr/lib" -type d | tr '\\n' ':')
LD_LIBRARY_PATH=$libraries exec "$root/usr/lib/chromium/chromium" "$@"
"""


def main() -> None:
    """Write the launcher; on failure exit with one line."""
    known = next(filter(None, map(shutil.which, NAMES)), None)
    unpacked = LAUNCHER.parent / "unpacked"
    script = f'#!/bin/sh\nexec "{known}" "$@"\n' if known else SCRIPT
    try:
        LAUNCHER.parent.mkdir(parents=True, exist_ok=True)
        if not known:
            shutil.rmtree(unpacked, ignore_errors=True)
            print("streamrl: downloading Chromium", flush=True)
            unpack_packages(["chromium", "fonts-dejavu-core"], unpacked, timeout_s=TIMEOUT_S)
        new = LAUNCHER.with_suffix(".new")
        new.write_text(script, encoding="utf-8")
        new.chmod(0o755)
        run([new, "--version"], TIMEOUT_S)
        os.replace(new, LAUNCHER)
    except (OSError, subprocess.TimeoutExpired) as error:
        sys.exit(f"streamrl: no Chromium ({error}); put one of {', '.join(NAMES)} on PATH")
    print(f"streamrl: {known or 'Chromium'} is used for tests and pictures of pages")


if __name__ == "__main__":
    main()
