"""Attacks on the world outside the jail: network, files, disk."""

from tests.rewards.sandbox.hostile import ERROR, PASS, Attack

NETWORK = [
    Attack(
        "connect to a server of the host",
        PASS,
        """
import socket
tried(socket.create_connection, ("127.0.0.1", {port}), 0.2)
contained()
""",
    ),
    Attack(
        "any kind of socket",
        PASS,
        """
import socket
for family in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX, socket.AF_NETLINK, 17, 40):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW):
        tried(socket.socket, family, kind)
contained()
""",
    ),
    Attack(
        "look up a name",
        PASS,
        """
import socket
tried(socket.getaddrinfo, "example.com", 80)
tried(socket.gethostbyname, "localhost.localdomain")
contained()
""",
    ),
    Attack(
        "fetch an address",
        PASS,
        """
import urllib.request
tried(urllib.request.urlopen, "http://127.0.0.1:{port}/", None, 0.2)
contained()
""",
    ),
    Attack(
        "an abstract socket of the host",
        PASS,
        """
import socket
def act():
    a, b = socket.socketpair()
    a.connect("\\0streamrl-hostile")
tried(act)
contained()
""",
    ),
    Attack(
        "bash's own network",
        ERROR,
        """
os.execvp("bash", ["bash", "-c", "echo x > /dev/tcp/127.0.0.1/{port} && echo contained"])
""",
    ),
]

FILES = [
    Attack(
        "read a file of the host",
        PASS,
        """
tried(open, "{canary}")
tried(open, "/../../{canary}")
contained()
""",
    ),
    Attack(
        "read what a host keeps secret",
        PASS,
        """
for path in ("/etc/passwd", "/etc/shadow", "/etc/hostname", "/etc/resolv.conf", "/root/.bashrc",
             "/home", "/run", "/var", "/sys", "/mnt", "/boot", "/opt", "/dev/zero", "/dev/mem",
             "/dev/kmsg", "/dev/sda", "/dev/vda", "/dev/tty", "/dev/pts"):
    tried(os.stat, path)
contained()
""",
    ),
    Attack(
        "symlinks out of the directory",
        PASS,
        """
for number, target in enumerate(("{canary}", "/proc/1/root{canary}", "../../..{canary}")):
    os.symlink(target, str(number))
    tried(open, str(number))
    tried(open, str(number), "w")
os.symlink("/usr", "tree")
tried(open, "tree/" + LEFT, "w")
contained()
""",
    ),
    Attack(
        "a hard link to a system file",
        PASS,
        """
tried(os.link, "/usr/bin/env", "env")
tried(os.rename, "/usr/bin/env", "env")
contained()
""",
    ),
    Attack(
        "write all over the system",
        PASS,
        """
for place in ("/", "/usr", "/usr/bin", "/usr/lib", "/etc", "/dev", "/var/tmp", "/root",
              "/home", "/run", os.path.dirname(os.__file__), sys.prefix):
    tried(open, os.path.join(place, LEFT), "w")
    tried(os.mkdir, os.path.join(place, LEFT))
contained()
""",
    ),
    Attack(
        "change the interpreter's library",
        PASS,
        """
import json
for path in (os.__file__, json.__file__, sys.executable):
    tried(open, path, "r+b")
    tried(os.chmod, path, 0o777)
    tried(os.unlink, path)
tried(os.mkdir, os.path.join(os.path.dirname(os.__file__), "__pycache__", LEFT))
contained()
""",
    ),
    Attack(
        "a device of its own",
        PASS,
        """
tried(os.mknod, "disk", 0o60666, os.makedev(254, 0))
tried(os.mknod, "memory", 0o20666, os.makedev(1, 1))
contained()
""",
    ),
    Attack(
        "a setuid program",
        PASS,
        """
import subprocess
for name in ("su", "sudo", "mount", "passwd"):
    done = subprocess.run(["sh", "-c", name + " -c id root </dev/null"], capture_output=True)
    if b"uid=0" in done.stdout:
        print("escaped")
for call in (os.setuid, os.setgid, os.seteuid):
    tried(call, 0)
tried(os.setgroups, [0])
contained()
""",
    ),
    Attack(
        "the run's own environment",
        PASS,
        """
leaked(dict(os.environ))
for name in os.environ:
    if name not in ("PATH", "HOME", "LANG", "TMPDIR", "PWD", "LC_CTYPE"):
        print("escaped", name)
contained()
""",
    ),
    Attack(
        "/proc",
        PASS,
        """
for path in ("/proc/self/environ", "/proc/1/environ", "/proc/{pid}/environ", "/proc/1/mem",
             "/proc/self/mem", "/proc/1/fd/0", "/proc/sys/kernel/core_pattern", "/proc/mounts"):
    tried(open, path)
tried(os.listdir, "/proc")
contained()
""",
    ),
    Attack(
        "mount a /proc",
        PASS,
        """
import subprocess
os.mkdir("proc")
subprocess.run(["mount", "-t", "proc", "proc", "proc"], capture_output=True)
if os.listdir("proc"):
    print("escaped")
contained()
""",
    ),
    Attack(
        "the sandbox's own files and memory of the host",
        PASS,
        """
leaked(sys.path)
leaked(sys.argv)
leaked(sys.modules)
try:
    import streamrl
    print("escaped")
except ImportError:
    contained()
""",
    ),
]

DISK = [
    Attack(
        "fill the disk",
        PASS,
        """
def fill():
    with open("big", "wb") as file:
        for _ in range(400):
            file.write(bytes(1 << 20))
tried(fill)
os.path.getsize("big") > (16 << 20) and print("escaped")
contained()
""",
    ),
    Attack(
        "fill the disk by many",
        PASS,
        """
def fill():
    for number in range(40):
        with open(str(number), "wb") as file:
            file.write(bytes(1 << 20))
tried(fill)
contained()
""",
    ),
    Attack(
        "a file of holes",
        PASS,
        """
def grow():
    with open("holes", "wb") as file:
        file.truncate(1 << 40)
tried(grow)
contained()
""",
    ),
    Attack(
        "fill memory through /dev/shm",
        PASS,
        """
def fill():
    with open("/dev/shm/" + LEFT, "wb") as file:
        for _ in range(400):
            file.write(bytes(1 << 20))
tried(fill)
tried(open, "/dev/" + LEFT, "wb")
contained()
""",
    ),
    Attack(
        "files without end",
        ERROR,
        """
number = 0
while True:
    open(str(number), "w").close()
    number += 1
""",
    ),
    Attack(
        "directories without end",
        ERROR,
        """
while True:
    os.mkdir("d")
    os.chdir("d")
""",
    ),
    Attack(
        "a dump of its memory",
        ERROR,
        """
import resource
tried(resource.setrlimit, resource.RLIMIT_CORE, (1 << 30, 1 << 30))
os.abort()
""",
    ),
]
