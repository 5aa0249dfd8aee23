"""A Slurm of several nodes on one machine: munge, a controller and a daemon for each node, all in one folder.

Without accounting, as on many a cluster. A job of a dead node waits ``cred_expire`` seconds, by default 120. Memory is
limited by what the daemons see, because control groups are not there everywhere. A node's processes are known by their
environment, so a node can die with all that runs on it.
"""

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import psutil

PACKAGES = {"slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "sbatch": "slurm-wlm", "munged": "munge"}
MARK = "CHECKED_NODE"  # in the environment of a node's daemon and of what it starts
CONFIGURATION = """
ClusterName=check
SlurmctldHost={host}
AuthInfo=socket={folder}/munge.socket,cred_expire=10
SlurmUser=root
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=1
JobAcctGatherParams=OverMemoryKill
SlurmdParameters=config_overrides
SlurmdTimeout=6
KillWait=2
ReturnToService=2
MinJobAge=60
"""


def why_not() -> str | None:
    """Why no Slurm can be started here; None where one can."""
    missing = sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})
    if missing:
        return f"needs Debian's {' and '.join(missing)}"
    return None if os.geteuid() == 0 else "needs root, to start Slurm's daemons"


class Slurm:
    """Nodes n1, n2, ... of one core each; ``environment`` leads Slurm's commands here."""

    def __init__(self, folder: Path, nodes: int, memory_mb: int):
        self.folder, self.names = folder, [f"n{number + 1}" for number in range(nodes)]
        self.daemons = dict[str, subprocess.Popen]()
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": f"{os.environ['PATH']}:/usr/sbin"}
        host, ports = socket.gethostname().partition(".")[0], free_ports(nodes + 1)
        lines = [CONFIGURATION.format(folder=folder, host=host, port=ports.pop())]
        lines += [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports.pop()} CPUs=1 RealMemory={memory_mb}"
            for name in self.names
        ]
        (folder / "slurm.conf").write_text("\n".join([*lines, "PartitionName=all Nodes=ALL Default=YES State=UP\n"]))
        (folder / "state").mkdir()
        (folder / "munge.key").write_bytes(os.urandom(1024))
        (folder / "munge.key").chmod(0o400)

    def run(self, *command: str) -> str:
        environment = os.environ | self.environment
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def start(self) -> None:
        files = ("socket", "key-file", "log-file", "pid-file", "seed-file")
        options = [f"--{kind}={self.folder}/munge.{kind.partition('-')[0]}" for kind in files]
        self.run("munged", "--force", *options)
        self.run("slurmctld")
        for name in self.names:
            self.start_node(name)

    def start_node(self, name: str, hiding: Path | None = None) -> None:
        """Start a node, or one that sees an empty disk of 1 MB in place of a folder."""
        command = ["slurmd", "-D", "-N", name]
        if hiding is not None:
            hiding.mkdir(parents=True, exist_ok=True)
            script = 'mount -t tmpfs -o size=1m tmpfs "$1" && shift && exec "$@"'
            command = ["unshare", "--mount", "sh", "-c", script, "sh", str(hiding), *command]
        self.daemons[name] = subprocess.Popen(
            command, env=os.environ | self.environment | {MARK: name}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.wait(lambda: "idle" in self.state_of(name), f"{name} to come up")

    def kill_node(self, name: str) -> None:
        """Kill a node's daemon and all that it has started, at once, as a machine that loses its power."""
        while found := self.processes(name):
            for process in found:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            time.sleep(0.05)
        if name in self.daemons:
            self.daemons.pop(name).wait()

    def miss_node(self, name: str) -> None:
        """Kill a node, and return when the controller has noticed."""
        self.kill_node(name)
        self.wait(lambda: "down" in self.state_of(name), f"{name} to be missed")

    def state_of(self, name: str) -> str:
        return self.run("sinfo", "--noheader", f"--nodes={name}", "--Node", "--format=%T").strip()

    def jobs(self) -> dict[str, tuple[str, str]]:
        """State and node of each job that the queue knows, by its id."""
        printed = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T|%N")
        return {job: (state, node) for job, state, node in (line.split("|") for line in printed.splitlines())}

    def job_on(self, name: str) -> str:
        """The job that runs on a node, by its id."""
        return next(job for job, (state, node) in self.jobs().items() if state == "RUNNING" and node == name)

    def processes(self, name: str) -> list[psutil.Process]:
        """A node's daemon and all that it has started."""
        found = [(process, process.info["environ"] or {}) for process in psutil.process_iter(["environ"])]
        ours = [each for each in found if each[1].get("SLURM_CONF") == self.environment["SLURM_CONF"]]
        return [process for process, own in ours if name in (own.get(MARK), own.get("SLURMD_NODENAME"))]

    def wait(self, until: Callable[[], object], what: str, seconds: float = 60) -> None:
        for _ in range(int(seconds / 0.1)):
            if until():
                return
            time.sleep(0.1)
        logs = "\n".join(path.read_text(errors="replace")[-1500:] for path in sorted(self.folder.glob("*.log")))
        raise AssertionError(f"waited {seconds} s for {what}: {self.jobs()}\n{logs}")

    def stop(self) -> None:
        for name in self.names:
            self.kill_node(name)
        for pid_file in ("slurmctld.pid", "munge.pid"):
            if (self.folder / pid_file).exists():
                with suppress(ProcessLookupError):
                    os.kill(int((self.folder / pid_file).read_text()), signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until all are found."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def slurm(folder: Path, nodes: int = 2, memory_mb: int = 5000) -> Iterator[Slurm]:
    """A Slurm in ``folder``, an empty one with a short path, which ends with the block."""
    cluster = Slurm(folder, nodes, memory_mb)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()
