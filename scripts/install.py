"""Build .venv: streamrl, editable, with vLLM, DeepSpeed and Ray for this machine's device.

`make` runs this with a bare Python (standard library only). It starts from nothing every time and
writes its stamp last, so an interrupted install is never taken for a complete one.
"""

import argparse
import ast
import configparser
import os
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path
from typing import Any

from debian_packages import run, unpack_packages

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
#: Deadline of each of the commands that bring bubblewrap, s.
APT_TIMEOUT_S = 60

SMOKE_CHECK = """
import deepspeed, peft, ray, torch
import math_verify, omegaconf, pandas, rich.live, tensordict, wandb
from transformers import Qwen2ForCausalLM
from vllm import LLM
built_for = "cpu" if torch.version.cuda is None else "gpu"
assert built_for == "{device}", f"torch {{torch.__version__}} is no {device} build"
"""


def main() -> None:
    """Install for the device of the command line; on failure exit with one line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "gpu"], required=True)
    parser.add_argument("--extra", help="only add the packages of this extra to .venv")
    parser.add_argument("--stamp", type=Path, required=True, help="file to write when done")
    arguments = parser.parse_args()
    started = time.monotonic()
    try:
        if arguments.extra:
            say(f"adding the packages of the extra {arguments.extra} to .venv")
            install_extra(arguments.extra, arguments.device)
        else:
            build(arguments.device)
    except subprocess.CalledProcessError as error:
        print(error.output or "", end="", file=sys.stderr)
        sys.exit(f"streamrl: not installed: {' '.join(map(str, error.cmd))[:200]} failed")
    arguments.stamp.touch()
    say(f".venv is ready after {time.monotonic() - started:.0f} s")


def build(device: str) -> None:
    """Build .venv from nothing."""
    say(f"building .venv for {device} with Python {sys.version.split()[0]}")
    venv.create(VENV, clear=True, with_pip=True)
    install(device)
    say(install_adapters(device))
    say("checking that torch, transformers, vllm, ray, deepspeed and peft import together")
    check(device)
    say(bring_bubblewrap(VENV / "bubblewrap"))


def say(text: str) -> None:
    """Print progress for the user."""
    print(f"streamrl: {text}", flush=True)


def install(device: str) -> None:
    """Put streamrl, the device's engines and the development tools into .venv."""
    pip: list[str | Path] = [PYTHON, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "-qq", "uv>=0.9,<1"], check=True)
    overrides = ["--override", "requirements/cpu_overrides.txt"] if device == "cpu" else []
    uv_install(device, "--editable", f".[{device},dev]", *overrides)


def install_adapters(device: str) -> str:
    """Put the packages of the optional extras into .venv, for their tests; return a line about it.

    Two of them are compiled, so an install continues without.
    """
    try:
        uv_install(device, "--quiet", "--no-deps", "-r", "requirements/adapters.txt")
    except subprocess.CalledProcessError:
        return "no packages of the extras, so their tests will fail (apt install gcc make)"
    return "packages of the extras are in .venv"


def install_extra(name: str, device: str) -> None:
    """Put the packages of an extra into .venv, without a change to streamrl or its packages."""
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    uv_install(device, "--quiet", *setup["options.extras_require"][name].split())


def uv_install(device: str, *arguments: str) -> None:
    """Run `uv pip install` for .venv."""
    command: list[str | Path] = [PYTHON, "-m", "uv", "pip", "install", "--python", PYTHON]
    subprocess.run([*command, *arguments], cwd=ROOT, env=uv_environment(device), check=True)


def uv_environment(device: str) -> dict[str, str]:
    """Return an environment for uv with pip's settings; uv does not read pip's configuration.

    PyTorch's CPU builds come from pip's find-links, or without any from uv's `cpu` backend. UV_*
    variables of the caller take precedence.
    """
    pip = pip_settings()
    settings = {
        "SSL_CERT_FILE": pip.get("cert"),
        "UV_DEFAULT_INDEX": pip.get("index-url"),
        "UV_FIND_LINKS": ",".join(pip.get("find-links", "").split()),
    }
    environment = {name: value for name, value in settings.items() if value} | dict(os.environ)
    if device == "cpu" and "UV_FIND_LINKS" not in environment:
        environment.setdefault("UV_TORCH_BACKEND", "cpu")
    return environment


def pip_settings() -> dict[str, str]:
    """Read the settings of `pip install` from its files and from PIP_* variables."""
    listing = subprocess.run(
        [PYTHON, "-m", "pip", "config", "list"], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    lines = [line.partition("=") for line in listing.splitlines()]
    keys = {key: ast.literal_eval(value) for key, _, value in lines}
    settings = {}
    for section in ("global", "install", ":env:"):  # the later one wins, as in pip
        for key, value in keys.items():
            if key.startswith(f"{section}."):
                settings[key.removeprefix(f"{section}.")] = value
    return settings


def check(device: str) -> None:
    """Import the engines in one process; show their output only on failure.

    Bytecode is written even if PYTHONDONTWRITEBYTECODE is set, as in container images: without it
    each actor of a run spends 13 more seconds on imports. Two packages with lazy imports, and
    streamrl, are compiled completely.
    """
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    quiet: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    smoke_check = SMOKE_CHECK.format(device=device)
    subprocess.run([PYTHON, "-c", smoke_check], env=environment, check=True, **quiet)
    (packages,) = VENV.glob("lib/python3.*/site-packages")
    whole = [packages / "ray", packages / "vllm", ROOT / "streamrl"]
    # A package may ship files of another Python version, which do not compile here.
    subprocess.run([PYTHON, "-m", "compileall", "-q", "-j", "0", *whole], check=False, **quiet)


def bring_bubblewrap(folder: Path) -> str:
    """Put bwrap into `folder` if the machine has none; return a line about the result.

    Only the sandbox of code rewards needs it, so an install continues without.
    """
    if shutil.which("bwrap"):
        return "bubblewrap is on PATH"
    with tempfile.TemporaryDirectory() as scratch:
        bwrap = Path(scratch) / "usr" / "bin" / "bwrap"
        try:
            unpack_packages(["bubblewrap"], Path(scratch), timeout_s=APT_TIMEOUT_S)
            run([bwrap, "--version"], APT_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired) as error:
            return f"no bubblewrap, so code rewards will not run (apt install bubblewrap): {error}"
        folder.mkdir(exist_ok=True)
        shutil.copy(bwrap, folder / "new")
        os.replace(folder / "new", folder / "bwrap")  # one that runs stays whole
    return f"bubblewrap is in {folder.relative_to(folder.parent.parent)}"


if __name__ == "__main__":
    main()
