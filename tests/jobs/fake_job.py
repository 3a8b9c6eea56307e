"""A job without torch, that speaks to its manager as `penstock run` does.

    python fake_job.py CHANNEL [how=value ...]

Its memory is a bytearray that is filled when it is awake and dropped when it sleeps.

    steps=N      it ends after so many (default 50)
    until=FILE   it does not end before there is one: it waits for it, and sleeps when it is told to
    step_s=S     how long a step takes (default 0.005)
    mib=N        what it holds when it is awake (default 1)
    unset=FILE   it makes that file, and does not set its signals before the file is gone
    start_s=S    how long until it can be put to sleep
    fail=N       the step at which it raises
    refuse=TEXT  it never sleeps, and says why
    say=TEXT     what it prints at each step
    deaf=1       it does not end by SIGINT and SIGTERM
    child=HOW    it begins a process that outlives it, and "inherits" its descriptors or not
"""

import os
import signal
import subprocess
import sys
import time

from penstock.swap.channel import JobEnd
from penstock.swap.pending_signals import listen_to_manager

MIB = 1024**2
MOVING_S = 0.25
"""What it says that one sleep took."""


class Job:
    def __init__(self, channel, *, mib="1", refuse="", **how):
        self.channel = JobEnd(channel)
        self.nbytes = int(mib) * MIB
        self.refuse = refuse
        self.memory = None

    def wake(self):
        self.channel.tell(state="waking", order=self.channel.order.number)
        self.memory = bytearray(b"x" * MIB) * (self.nbytes // MIB)
        self.channel.tell(state="awake", flash_bytes=0, fetched_bytes=0)

    def step_over(self):
        self.channel.status.steps += 1
        self.follow()

    def follow(self):
        order = self.channel.look()
        self.channel.tell(order=order.number)
        if not order.sleep:
            return
        if self.refuse:
            self.channel.tell(refused=self.refuse)
            return
        status = self.channel.status
        self.channel.tell(state="suspending", refused="", order=order.number)
        self.memory = None
        status.sleeps += 1
        status.moving_s += MOVING_S
        self.channel.tell(state="asleep", flash_bytes=self.nbytes)
        while self.channel.look().sleep:
            if self.channel.order.fetch_bytes != status.fetched_bytes:
                self.memory = bytearray(b"x") * self.channel.order.fetch_bytes
                self.channel.tell(fetched_bytes=self.channel.order.fetch_bytes)
            time.sleep(0.005)
        self.wake()


def main(channel, *words):
    signal.alarm(120)  # whatever became of the test
    how = dict(word.split("=", 1) for word in words)
    if "unset" in how:
        open(how["unset"], "x").close()
        while os.path.exists(how["unset"]):
            time.sleep(0.005)
    listen_to_manager()
    if how.get("deaf"):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if how.get("child"):
        code = "import time\ntime.sleep(60)"
        inherits = how["child"] == "inherits"
        print(
            subprocess.Popen([sys.executable, "-c", code], close_fds=not inherits).pid, flush=True
        )
    job = Job(channel, **how)
    time.sleep(float(how.get("start_s", 0)))
    job.wake()
    for step in range(int(how.get("steps", 50))):
        if step == int(how.get("fail", -1)):
            raise ValueError("this job was told to fail")
        time.sleep(float(how.get("step_s", 0.005)))
        if "say" in how:
            print(how["say"], flush=True)
        job.step_over()
    while "until" in how and not os.path.exists(how["until"]):
        time.sleep(0.005)
        job.follow()
    job.channel.tell(state="over", code=0)
    print("all steps are done", os.getpid())


if __name__ == "__main__":
    main(*sys.argv[1:])
