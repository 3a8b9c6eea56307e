"""The job of ``soak.py``: trains until it is told to end, and notes each step in a file that outlives it.

    _soak_child.py KIND FOLDER NOTES {"tight": false}

``plain`` is the undisturbed run, in memory. In ``durable`` weights, states of AdamW, gradients and what
autograd saves are on flash, each step is durable, and a small checkpoint beside it has the rest: position
in the data, random generators, schedule. In ``checkpoints`` all but weights is on flash, and whole
checkpoints are saved in the background. SIGTERM suspends it at the end of a step; then SIGUSR2 resumes
it, and SIGTERM ends it. SIGUSR1 ends it after the next evaluation.
"""

import hashlib
import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import _weights_model
import numpy as np
import torch

import penstock
from penstock.checkpoint import Checkpointer, training_state
from penstock.data import FlashDataset, FlashLoader, Sample
from penstock.lab.characterize.child_cleanup import exit_with_parent
from penstock.optim import FlashAdamW

SHAPE = _weights_model.Shape(192, 3, 4, 512, 256)
TOKENS, BATCH, MICRO_BATCHES = 64, 4, 2
SAMPLES = 4000
EVALUATED_EVERY = 20
SUSPENDED_EVERY = 50
SAVED_EVERY = 5
AHEAD = 40
"""Steps that the undisturbed run may be ahead of what is compared with it."""
PATIENCE_S = 300


def main():
    kind, place, notes, how = sys.argv[1:]
    exit_with_parent(os.getppid())
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = KINDS[kind](Path(place), Notes(Path(notes)), **json.loads(how))
    with run:
        run.train()


def write_tokens(path):
    """Write the bytes of Python's own modules as tokens: text, which can be learnt."""
    text = b"".join(each.read_bytes() for each in sorted(Path(os.__file__).parent.glob("*.py")))
    np.frombuffer(text[: SAMPLES * TOKENS], np.uint8).astype(np.uint16).tofile(path)


def network():
    model = _weights_model.Decoder(SHAPE, torch.float32)
    model.norm = torch.nn.Sequential(model.norm, torch.nn.Dropout(0.1))
    return model


class Notes:
    """Lines of JSON, each written at once."""

    def __init__(self, path):
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def __call__(self, **what):
        os.write(self._file, (json.dumps(what) + "\n").encode())


def resources():
    """Resident bytes, descriptors and threads of this process, and the bytes that it has moved."""
    moved = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident": pages * os.sysconf("SC_PAGE_SIZE"),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "read": int(moved["read_bytes"]),
        "written": int(moved["write_bytes"]),
    }


class Run:
    """Training that knows nothing of faults: the loop, its data, its evaluation."""

    session = None

    def __init__(self, place, note, *, tight=False, needed=None):
        self.place, self.note, self.tight, self.needed = place, note, tight, needed
        self.stack = ExitStack()
        self.signals = set()
        for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(each, lambda number, _: self.signals.add(number))
        self.model = network()
        self.step, self.durable = 0, 0

    def __enter__(self):
        try:
            self.optimizer = self.make_optimizer()
            self.scheduler = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(
                self.optimizer, 200
            )
            self.open()
            data = FlashDataset(
                self.place / "tokens.bin",
                context=TOKENS,
                extra=0,
                memory="2MiB",
                index_dir=self.place / "index",
                decode=self.decoded,
            )
            self.stack.callback(data.close)
            loader = FlashLoader(data, BATCH, order="full", seed=1, session=self.session)
            self.loader = self.stack.enter_context(loader)
            self.resume()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, *_):
        self.stack.close()

    def offload(self, **more):
        return self.stack.enter_context(
            penstock.offload(
                self.model,
                self.optimizer,
                device_memory="5MiB",
                flash=self.place / "spill",
                flash_capacity="4MiB" if self.tight else "200MiB",
                floor="64KiB",
                **more,
            )
        )

    def decoded(self, sample: Sample):
        while (self.place / "slow").exists():
            time.sleep(0.01)
            if self.signals:
                break
        return torch.from_numpy(np.frombuffer(sample.data, np.uint16).astype(np.int64))

    def batches(self):
        while True:
            yield from self.loader

    def train(self):
        batches = self.batches()
        held_out = torch.from_numpy(
            np.fromfile(self.place / "tokens.bin", np.uint16, 8 * TOKENS).astype(np.int64)
        ).view(8, TOKENS)
        self.note(resumed=self.step, **resources())
        while True:
            losses = []
            for _ in range(MICRO_BATCHES):
                loss = _weights_model.loss_of(self.model, next(batches))
                losses.append(loss.item().hex())
                loss.backward()
            self.step += 1
            self.update()
            self.note(step=self.step, losses=losses, durable=self.durable, **resources())
            if self.step % EVALUATED_EVERY == 0:
                self.evaluate(held_out)
                if signal.SIGUSR1 in self.signals:
                    break
            if signal.SIGTERM in self.signals:
                if self.rest():
                    break
            elif self.step % SUSPENDED_EVERY == 0:
                self.suspend_and(lambda: None)
        self.note(ended=self.step)

    def evaluate(self, inputs):
        self.model.eval()
        with torch.no_grad():
            loss = _weights_model.loss_of(self.model, inputs)
        self.model.train()
        digest = hashlib.blake2b()
        for each in self.model.parameters():
            digest.update(each.detach().numpy().tobytes())
        self.note(evaluated=self.step, loss=loss.item().hex(), weights=digest.hexdigest())

    def rest(self):
        """Suspend until a signal comes; return whether that is the end."""
        self.signals -= {signal.SIGTERM, signal.SIGUSR2}

        def wait():
            self.note(suspended=self.step, **resources())
            while not self.signals & {signal.SIGTERM, signal.SIGUSR2}:
                time.sleep(0.01)

        if not self.suspend_and(wait):
            return False
        return signal.SIGTERM in self.signals

    def suspend_and(self, wait):
        """Suspend the session, wait and resume; False if there was no space for it."""
        try:
            self.suspend()
        except penstock.NoSpaceError as error:
            self.note(no_space=str(error), suspended=None)
            return False
        wait()
        penstock.resume(self.session)
        return True


class Plain(Run):
    """The undisturbed run. It waits for those that are compared with it."""

    def make_optimizer(self):
        return torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)

    def open(self):
        pass

    def resume(self):
        pass

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        while self.step > int(Path(self.needed).read_text()) + AHEAD:
            time.sleep(0.1)

    def suspend_and(self, wait):
        return True


class Durable(Run):
    """All on flash; each step is durable."""

    def make_optimizer(self):
        optimizer = FlashAdamW(
            self.model.parameters(),
            lr=1e-3,
            flash=self.place / "states",
            tile=1 << 16,
            durable=True,
            overlap=True,
            accumulation=MICRO_BATCHES,
            gradient_memory="256KiB",
        )
        self.stack.callback(optimizer.close)
        return optimizer

    def open(self):
        self.session = self.offload(weights="flash", weights_memory="3MiB")
        self.rests = self.stack.enter_context(Checkpointer(self.place / "rests", keep=3, every=1))

    def others(self):
        return training_state(scheduler=self.scheduler, data=self.loader, step=self.step)

    def resume(self):
        self.step = self.durable = self.optimizer.resume()
        if self.step:
            self.rests.load(self.others(), step=self.step)
            self.scheduler.step()

    def update(self):
        self.keep_others()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.durable = self.step

    def keep_others(self):
        """Save what the optimizer's durable step does not have, before it; wait for space if need be."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                self.rests.save(self.step, self.others())
                return
            except penstock.NoSpaceError as error:
                if time.monotonic() > until:
                    raise
                self.note(no_space=str(error))
                time.sleep(0.1)

    def suspend(self):
        penstock.suspend(self.session)


class Checkpointed(Run):
    """All but weights on flash; checkpoints are saved in the background."""

    failures = 0

    def make_optimizer(self):
        optimizer = FlashAdamW(
            self.model.parameters(),
            lr=1e-3,
            flash=self.place / "states",
            tile=1 << 16,
            gradient_memory="1MiB",
        )
        self.stack.callback(optimizer.close)
        return optimizer

    def open(self):
        self.session = self.offload()
        saves = Checkpointer(self.place / "checkpoints", keep=2, every=SAVED_EVERY)
        self.checkpoints = self.stack.enter_context(saves)

    def parts(self):
        return training_state(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            data=self.loader,
            step=self.step,
        )

    def resume(self):
        state = self.checkpoints.load(self.parts())
        self.step = 0 if state is None else state["step"]

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        if self.checkpoints.due(self.step):
            self.save(wait=False)
        if self.checkpoints.stats.failures > self.failures:
            self.failures = self.checkpoints.stats.failures
            self.note(no_space="in the background")
        newest = self.checkpoints.latest()
        self.durable = 0 if newest is None else newest.step

    def save(self, *, wait):
        """Save a checkpoint; None if there is no space."""
        try:
            return self.checkpoints.save(self.step, self.parts(), wait=wait)
        except penstock.NoSpaceError as error:
            self.note(no_space=str(error))
            return None

    def suspend(self):
        saved = self.save(wait=True)
        if saved is None:
            penstock.suspend(self.session)
        else:
            penstock.suspend(self.session, checkpoint=saved.path, state=self.parts())


KINDS = {"plain": Plain, "durable": Durable, "checkpoints": Checkpointed}

if __name__ == "__main__":
    main()
