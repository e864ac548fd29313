"""A real Slurm of one node on this machine: munged, slurmctld and slurmd on loopback, all of it in one folder.

There is no accounting: what Slurm knows of a job is what squeue and scontrol say, for MinJobAge after its end.
"""

from __future__ import annotations

import ctypes
import os
import random
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import TracebackType

__all__ = ["NODE", "SlurmCluster", "absent_programs"]

NODE = "localhost"
DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "srun", "squeue", "sinfo", "scontrol", "scancel")
PATIENCE_S = 120.0
POLL_S = 0.05
# Unix sockets have at most 107 characters; Slurm's own are `spool/localhost_<job>.<step>`.
LINKS = "/tmp"
# Below what Linux gives to outgoing connections, which could take a port between the look and its use.
PORTS = range(20_000, 32_000)
PR_SET_PDEATHSIG = 1
# Stand for GPUs: Slurm counts device files, and never opens them.
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random")

CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
AuthType=auth/munge
CredType=cred/munge
# A requeued job waits for as long as credentials live: 120 s by default.
AuthInfo=socket={at}/munge.socket,cred_expire={requeue_wait_s}
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={at}/state
SlurmdSpoolDir={at}/spool
SlurmctldPidFile={at}/slurmctld.pid
SlurmdPidFile={at}/slurmd.pid
SlurmctldLogFile={at}/slurmctld.log
SlurmdLogFile={at}/slurmd.log
PlugStackConfig={at}/plugstack.conf
MailProg=/bin/true
MpiDefault=none
SwitchType=switch/none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
JobRequeue=1
ReturnToService=2
OverTimeLimit=0
KillWait=2
CompleteWait=0
# A busy machine's node must not be taken for dead.
SlurmdTimeout=300
SlurmctldTimeout=300
BatchStartTimeout=60
MessageTimeout=30
SlurmdParameters=config_overrides
{gres_types}
NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory_mb} {gres} State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
PartitionName=other Nodes=ALL MaxTime=INFINITE State=UP
"""


def absent_programs() -> list[str]:
    """Which of Slurm's and munge's programs are not on this machine."""
    return [name for name in (*DAEMONS, *COMMANDS) if program(name) is None]


def program(name: str) -> str | None:
    # Daemons lie in folders that only root has in its PATH.
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"]))


class SlurmCluster:
    """A cluster that lives as long as its `with`, or from `start` to `stop`.

    Its daemons also die with the thread that started them. Several clusters may run at once.

    Args:
        folder: where all of it lies: configuration, key, sockets, logs, states, spool. Made if absent.
        cpus: processors that the node declares, whatever the machine has. A job takes one where it asks for nothing.
        memory_mb: memory that the node declares; it is not shared out among jobs.
        gpus: GPUs that the node declares, at most 4; there are none behind them.
        requeue_wait_s: how long a requeued job waits before it is started again; starting one must not take longer.

    Attributes:
        environment: what a process needs to use this cluster and no other.
    """

    def __init__(
        self, folder: Path, *, cpus: int = 8, memory_mb: int = 64_000, gpus: int = 2, requeue_wait_s: int = 10
    ) -> None:
        self.folder = folder.resolve()
        self.cpus, self.memory_mb, self.gpus, self.requeue_wait_s = cpus, memory_mb, gpus, requeue_wait_s
        self.config = self.folder / "slurm.conf"
        foreign = ("SLURM", "SBATCH_", "SRUN_", "SQUEUE_", "SINFO_", "SCONTROL_", "SCANCEL_", "SUBMITIT_")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(foreign)}
        self.environment = {**inherited, "SLURM_CONF": str(self.config)}
        self._link: Path | None = None
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> SlurmCluster:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Starts all daemons and waits until the node is idle.

        Raises:
            RuntimeError: a program is absent or a daemon ended; with the ends of all logs.
            TimeoutError: the node was not idle in time; with the same.
        """
        if absent := absent_programs():
            raise RuntimeError(f"absent: {', '.join(absent)}; Debian's packages slurm-wlm and munge have them")
        try:
            self._write()
            files = {name: f"{self.folder}/munged.{name}" for name in ("pid", "log", "seed")}
            # Forced: temporary folders that only their owner may enter are as good here.
            options = [f"--socket={self._link}/munge.socket", f"--key-file={self.folder}/munge.key"]
            options += [f"--pid-file={files['pid']}", f"--log-file={files['log']}", f"--seed-file={files['seed']}"]
            self._launch("munged", "--foreground", "--force", *options)
            self.wait_until(lambda: (self.folder / "munge.socket").exists(), "munged has a socket")
            self._launch("slurmctld", "-D", "-f", str(self.config))
            self._launch("slurmd", "-D", "-N", NODE, "-f", str(self.config))
            self.wait_until(lambda: self.node_state() == "idle", "the node is idle")
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Ends all daemons and all that they started. What was written stays in the folder."""
        for name in reversed(DAEMONS):
            self._end(name)
        self._end_jobs()
        if self._link:
            shutil.rmtree(self._link.parent)
            self._link = None

    def run(self, *command: str | Path, check: bool = True) -> str:
        """What a command prints, in this cluster's environment and folder.

        Raises:
            RuntimeError: it failed, and `check` is set; with its words.
        """
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if check and done.returncode:
            said = f"{done.stdout}{done.stderr}"
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{said}")
        return done.stdout

    def submit(self, script: str, *options: str) -> str:
        """The id of a new batch job; script is what bash runs, options are sbatch's."""
        return self.run("sbatch", "--parsable", *options, f"--wrap={script}").strip()

    def queue(self) -> dict[str, str]:
        """The state of all jobs by id, ended ones included; those of arrays by `<array>_<task>`."""
        lines = self.run("squeue", "--noheader", "--array", "--states=all", "--format=%i|%T").splitlines()
        return dict(line.strip().split("|") for line in lines)

    def job(self, job: str) -> dict[str, str]:
        """What scontrol says of one job: JobState, Reason, Restarts, ExitCode and so on."""
        words = self.run("scontrol", "--oneliner", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for(self, job: str, *states: str) -> str:
        """Waits until a job has one of some states, and says which."""
        self.wait_until(lambda: self.queue().get(job) in states, f"job {job} is {' or '.join(states)}")
        return self.queue()[job]

    def wait_until(self, happened: Callable[[], bool], what: str) -> None:
        """Waits for anything; daemons that end meanwhile end the wait.

        Raises:
            RuntimeError: a daemon ended.
            TimeoutError: it took more than two minutes.
        """
        end = time.monotonic() + PATIENCE_S
        while not happened():
            ended = [name for name, daemon in self._daemons.items() if daemon.poll() is not None]
            if ended:
                raise RuntimeError(f"{', '.join(ended)} ended before {what}\n{self._logs()}")
            if time.monotonic() > end:
                raise TimeoutError(f"after {PATIENCE_S:.0f} s it is not so that {what}\n{self._logs()}")
            time.sleep(POLL_S)

    def node_state(self) -> str:
        """The node's state in one word: idle, mixed, allocated, draining, drained, down*; empty before the start."""
        return self.run("sinfo", "--noheader", "--partition=main", "--format=%T", check=False).strip()

    def drain(self) -> None:
        """Lets the node start no more jobs; those that run go on."""
        self.run("scontrol", "update", f"NodeName={NODE}", "State=DRAIN", "Reason=test")

    def resume(self) -> None:
        """Ends a drain, and waits until the node takes jobs again."""
        self.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME")
        self.wait_until(lambda: self.node_state() in ("idle", "mixed", "allocated"), "the node is resumed")

    def kill_node(self) -> None:
        """Ends slurmd and all processes of jobs at once, as a power cut would.

        Slurm is told, as an operator would tell it: by itself it would notice after SlurmdTimeout. Jobs are requeued.
        """
        self._end("slurmd", signal.SIGKILL)
        self._end_jobs()
        self.run("scontrol", "update", f"NodeName={NODE}", "State=DOWN", "Reason=test")
        self.wait_until(lambda: self.node_state().startswith("down"), "the node is down")

    def restart_node(self) -> None:
        """Starts slurmd again, and waits until the node takes jobs."""
        self._launch("slurmd", "-D", "-N", NODE, "-f", str(self.config))
        self.wait_until(lambda: self.node_state() in ("idle", "mixed", "allocated"), "the node is back")

    def reset(self) -> None:
        """Cancels all jobs and brings the node back, so that it is idle again. Job ids go on."""
        self.run("scancel", f"--user={os.getuid()}")
        if "slurmd" not in self._daemons:
            self.restart_node()
        if self.node_state() != "idle":
            self.run("scontrol", "update", f"NodeName={NODE}", "State=RESUME", check=False)
        self.wait_until(lambda: self.node_state() == "idle", "the node is idle again")

    def processes(self, job: str | None = None) -> dict[int, str]:
        """The processes of a job, or of all: pid and command line.

        Args:
            job: as in `queue`; the steps' own slurmstepd counts among those of all jobs, not among a job's.
        """
        found = {}
        ours = f"SLURM_CONF={self.config}"
        for pid, environment, command in running():
            variables = environment.split("\0")
            if ours not in variables:
                continue
            named = dict(entry.split("=", 1) for entry in variables if "=" in entry)
            array = f"{named.get('SLURM_ARRAY_JOB_ID')}_{named.get('SLURM_ARRAY_TASK_ID')}"
            of_a_job = "SLURM_JOB_ID" in named
            if (of_a_job and job in (None, named["SLURM_JOB_ID"], array)) or (
                job is None and command.startswith("slurmstepd")
            ):
                found[pid] = command
        return found

    def _write(self) -> None:
        for name in ("state", "spool"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        key = self.folder / "munge.key"
        key.touch(mode=0o600)
        key.write_bytes(os.urandom(128))
        self._link = Path(tempfile.mkdtemp(prefix="slurm-", dir=LINKS)) / "at"
        self._link.symlink_to(self.folder)
        controller_port, node_port = free_ports(2)
        text = CONFIG.format(
            at=self._link,
            host=socket.gethostname().split(".")[0],
            user=os.getuid(),
            node=NODE,
            cpus=self.cpus,
            memory_mb=self.memory_mb,
            gres=f"Gres=gpu:{self.gpus}" if self.gpus else "",
            gres_types="GresTypes=gpu" if self.gpus else "",
            controller_port=controller_port,
            node_port=node_port,
            requeue_wait_s=self.requeue_wait_s,
        )
        # Both lie beside slurm.conf, so that nothing of /etc is read.
        (self.folder / "plugstack.conf").touch(mode=0o600)
        (self.folder / "gres.conf").write_text("".join(f"Name=gpu File={DEVICES[k]}\n" for k in range(self.gpus)))
        self.config.write_text(text)

    def _launch(self, name: str, *options: str) -> None:
        with open(self.folder / f"{name}.out", "ab") as output:
            self._daemons[name] = subprocess.Popen(
                [str(program(name)), *options],
                env=self.environment,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def _end(self, name: str, sign: signal.Signals = signal.SIGTERM) -> None:
        daemon = self._daemons.pop(name, None)
        if daemon is None:
            return
        daemon.send_signal(sign)
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()

    def _end_jobs(self) -> None:
        """Until none is left: one that was about to fork has children that are not on the first list."""
        while found := self.processes():
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _logs(self) -> str:
        ends = []
        for path in sorted([*self.folder.glob("*.log"), *self.folder.glob("*.out")]):
            ends.append(f"{path.name}:\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:]))
        return "\n".join(ends)


def running() -> Iterator[tuple[int, str, str]]:
    """The pid, environment (entries end in a zero character) and command line of processes that may be looked at."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                environment = (entry / "environ").read_text(errors="replace")
                command = (entry / "cmdline").read_text(errors="replace")
                yield int(entry.name), environment, command.replace("\0", " ").strip()


def free_ports(count: int) -> list[int]:
    """Ports of 127.0.0.1 that nobody listens on."""
    found: list[int] = []
    for port in random.sample(PORTS, len(PORTS)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            break
    return found


def die_with_parent() -> None:
    # A killed test run leaves no daemons behind.
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
