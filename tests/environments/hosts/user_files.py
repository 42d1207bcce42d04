"""Environment files as users write them."""

GUESS = """
import random
from streamrl.environments import Turn

class Guess:
    def reset(self, row, seed):
        self.n = random.Random(seed).randrange(64)
        return "0-63"

    def step(self, reply):
        guess = int(reply.text)
        if guess == self.n:
            return Turn("=", reward=1, done=True)
        return Turn("<" if self.n < guess else ">")
"""
ASYNC_GUESS = GUESS.replace("    def ", "    async def ")
CALCULATOR = '''
class Calculator:
    def reset(self, row):
        self.truth = row.ground_truth

    def multiply(self, a: int, b: int) -> str:
        """Multiply two numbers."""
        return str(a * b)

    def score(self, episode):
        return float(episode.answer == self.truth)
'''
ASYNC_CALCULATOR = CALCULATOR.replace("    def ", "    async def ")
COMMANDS = '''
import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time

from streamrl.environments import Turn

HOARD = []

class Commands:
    """Environment whose methods run the commands that the policy and the row give."""

    def reset(self, row):
        self.on_close = row.extra_info.get("close", "")
        run(row.extra_info.get("reset", ""))
        return str(os.getpid())

    async def step(self, reply):
        if reply.text.startswith("await "):
            await asyncio.sleep(float(reply.text.split()[1]))
        elif reply.text.startswith("block "):
            time.sleep(float(reply.text.split()[1]))
        return Turn(str(await asyncio.to_thread(run, reply.text)))

    def score(self, episode):
        run(episode.finish_reason)
        return 0.5

    def close(self):
        run(self.on_close)


class SyncCommands(Commands):
    """Commands with a sync step."""

    def step(self, reply):
        return Turn(str(run(reply.text)))


def run(command):
    name, _, argument = command.partition(" ")
    if name == "hang":
        time.sleep(600)
    if name == "sleep":
        time.sleep(float(argument))
    if name == "wait_for":
        while not os.path.exists(argument):
            time.sleep(0.01)
    if name == "fork" and os.fork() == 0:
        return "child"
    if name == "raise":
        raise RuntimeError("it broke")
    if name == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if name == "leak":
        HOARD.append(b"x" * (400 << 20))
        time.sleep(600)
    if name == "print":
        print("x" * 100_000, flush=True)
        os.write(1, b"y" * 100_000)
    if name == "fork_bomb":
        # Doubles every 0.1 s; if nothing kills it, it ends with 256 processes.
        for _ in range(8):
            os.fork()
            with open(argument, "a") as file:
                file.write(f"{os.getpid()} ")
            time.sleep(0.1)
        time.sleep(600)
    if name == "breed":
        children = [
            subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(5)
        ]
        return " ".join(str(child.pid) for child in children)
    return os.getpid()
'''
LEANING = """
import os, pathlib, random
from streamrl.environments import Turn
CURRENT = {}
FILE = pathlib.Path("FOLDER", "fixed_name")
class Leaning:
    def reset(self, row, seed):
        random.seed(seed)
        os.environ["MY_SEED"] = CURRENT["seed"] = str(seed)
        FILE.write_text(str(seed))
        return "Go."
    def step(self, reply):
        return Turn(str(ANSWER))
"""
SHARED_STATE = ("random.random()", "os.environ['MY_SEED']", "CURRENT['seed']", "FILE.read_text()")
"""Answers of the leaning environment, each of which depends on state that episodes share."""
