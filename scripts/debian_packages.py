"""Unpack packages of a Debian or Ubuntu into a folder: needs no privileges, changes no system."""

import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any


def unpack_packages(names: list[str], folder: Path, *, timeout_s: float) -> None:
    """Unpack packages, and those that they need and the machine lacks, into a new folder.

    timeout_s: deadline of each command. Raises OSError if it has no apt or a command fails, and
    TimeoutExpired.
    """
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        raise OSError("this is no Debian or Ubuntu")
    with tempfile.TemporaryDirectory() as scratch:
        for package in download_packages(names, Path(scratch), timeout_s):
            run(["dpkg-deb", "--extract", package, folder], timeout_s)


def download_packages(names: list[str], scratch: Path, timeout_s: float) -> list[Path]:
    """Download the .deb files by the system's package lists, else by fresh ones."""
    for place in ("lists/partial", "archives/partial"):
        (scratch / place).mkdir(parents=True)
    own = [*("-qq", "-o", f"Dir::Cache={scratch}"), *("-o", "APT::Sandbox::User=")]
    own += ["-o", "Debug::NoLocking=1"]
    wanted = ["install", "--download-only", "--yes", "--no-install-recommends", *names]
    try:
        run(["apt-get", *own, *wanted], timeout_s)
    except OSError:
        own += ["-o", f"Dir::State::lists={scratch}/lists"]
        run(["apt-get", *own, "update"], timeout_s)
        run(["apt-get", *own, *wanted], timeout_s)
    return sorted((scratch / "archives").glob("*.deb"))


def run(command: list[str | Path], timeout_s: float) -> None:
    """Run a command. Raises OSError with its last line, or TimeoutExpired."""
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, check=False, timeout=timeout_s, **quiet)
    if done.returncode != 0:
        last_line = (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise OSError(f"{command[0]}: {last_line}")
