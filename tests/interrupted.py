"""Training steps that an exception interrupts amid Penstock's code, as by a signal's handler.

CPython calls a handler in the main thread only: at the start of a function, after a call of a function
that is not Python's, and where a loop begins again. A :class:`Interrupt` raises at one of these points,
counted from 0, in a file of Penstock's.

As a program it interrupts one step after the other, each in a session of its own, and prints a line of
JSON for each point: what was wrong, or nothing. What hangs ends the process, with all tracebacks.
"""

import dis
import faulthandler
import gc
import json
import os
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import torch

import penstock
from offload_runs import FLOOR_BYTES, MACHINE, same_bits
from penstock.api import Session
from penstock.core.config import OffloadConfig
from penstock.core.errors import PenstockError
from penstock.optim import FlashAdamW
from penstock.store.account import host_account
from weights_rig import Chain, bits, built, inputs

SOURCE = str(Path(penstock.__file__).parent)
PATIENCE_S = float(os.environ.get("PENSTOCK_PATIENCE", "20"))
WIDTH = 64

_CALLS = {
    dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD") if name in dis.opmap
}
_RESUME = dis.opmap["RESUME"]


class HandlerError(Exception):
    """What the handler raises."""


class Interrupt:
    """Raises once, at a point of this thread's code of Penstock; as a context manager.

    Attributes:
        points: Points that were passed.
        where: File, line and function where it raised; None if it has not.
    """

    def __init__(self, at=None, error=HandlerError):
        self.at, self.error = at, error
        self.points, self.where = 0, None
        self._frames, self._codes = {}, {}

    def __enter__(self):
        sys.settrace(self._called)
        return self

    def __exit__(self, *_):
        sys.settrace(None)

    def _operations(self, code):
        found = self._codes.get(code)
        if found is None:
            found = self._codes[code] = code.co_code
        return found

    def _called(self, frame, event, _):
        caller = self._frames.get(id(frame.f_back))
        if caller is not None:
            caller[0] = None  # it called a function of Python's
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        code = self._operations(frame.f_code)
        at = frame.f_lasti
        if code[at] == _RESUME and code[at + 1] < 2:
            self._point(frame)
        self._frames[id(frame)] = [None]
        return self._within

    def _within(self, frame, event, _):
        if event == "return":
            self._frames.pop(id(frame), None)
        elif event == "opcode":
            state = self._frames.setdefault(id(frame), [None])
            if state[0] in _CALLS:
                self._point(frame)
            state[0] = self._operations(frame.f_code)[frame.f_lasti]
        return self._within

    def _point(self, frame):
        if self.points == self.at:
            sys.settrace(None)
            self.points += 1
            file = frame.f_code.co_filename[len(SOURCE) + 1 :]
            self.where = f"{file}:{frame.f_lineno} {frame.f_code.co_qualname}"
            raise self.error("by a signal's handler")
        self.points += 1


def squared(y):
    return y.square().mean()


class Training:
    """Steps in a session. A subclass says of what, and how."""

    options = {"policy": "all"}  # noqa: RUF012

    def __init__(self, path):
        self.path = path
        self.data = inputs(4, shape=(256, WIDTH))
        self.model = built(lambda: Chain(depth=4, width=WIDTH))
        given = {"flash": str(path), "flash_capacity": "1GiB", "floor": FLOOR_BYTES, **self.options}
        given = {name: value for name, value in given.items() if value is not None}
        config = OffloadConfig.from_mapping(given)
        self.session = Session(config, model=self.model, machine=MACHINE)

    def __enter__(self):
        self.session.__enter__()
        self.optimizer = self.make_optimizer()
        return self

    def __exit__(self, *_):
        self.session.__exit__(None, None, None)
        if hasattr(self.optimizer, "close"):
            self.optimizer.close()

    def make_optimizer(self):
        return torch.optim.SGD(self.model.parameters(), lr=0.05)

    def backward(self, x):
        self.model(x).square().mean().backward()

    def step(self, x):
        self.optimizer.zero_grad()
        self.backward(x)
        self.optimizer.step()

    def values(self):
        return {name: bits(each) for name, each in self.model.named_parameters()}


class Activations(Training):
    """Saved tensors on flash."""


class Host(Training):
    """Saved tensors in host memory."""

    options = {"policy": "all", "flash": None, "flash_capacity": None, "host_memory": "64MiB"}  # noqa: RUF012


class Codec(Training):
    """Saved tensors on flash, encoded."""

    options = {"policy": "all", "codec": "zero-value"}  # noqa: RUF012


class Weights(Training):
    """Weights on flash, an optimizer on flash that updates during backward."""

    options = {  # noqa: RUF012
        "policy": "all",
        "weights": "flash",
        "weights_memory": "40KiB",
        "floor": 4096,
        "device_memory": "64MiB",
    }

    def make_optimizer(self):
        return FlashAdamW(
            self.model.parameters(), lr=1e-2, flash=str(self.path), tile=6144, overlap=True
        )


class WeightsOfSgd(Weights):
    """Weights on flash, and an optimizer of torch's."""

    def make_optimizer(self):
        return Training.make_optimizer(self)


class FlashOptimizer(Training):
    """Weights in memory, states on flash."""

    def make_optimizer(self):
        return FlashAdamW(self.model.parameters(), lr=1e-2, flash=str(self.path), tile=1024)


class MicroBatched(Training):
    """Blocks on all micro-batches before the next block."""

    def backward(self, x):
        losses = penstock.micro_batched([*self.model.layers, squared], x, parts=2)
        (sum(losses) / 2).backward()


KINDS = {
    each.__name__: each
    for each in (Activations, Host, Codec, Weights, WeightsOfSgd, FlashOptimizer, MicroBatched)
}


def opened_files():
    found = set()
    for each in os.listdir("/proc/self/fd"):
        try:
            found.add(os.readlink(f"/proc/self/fd/{each}"))
        except OSError:
            continue
    return {each for each in found if not each.startswith(("/proc", "pipe", "anon_inode"))}


def plain_gradients(values, x):
    """Gradients of a model without Penstock, with these weights."""
    model = built(lambda: Chain(depth=4, width=WIDTH))
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(values[name])
    model(x).square().mean().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def trained_on(training):
    """Go on after an interrupt; what is wrong. An error that names its reason is right."""
    x = training.data[3]
    try:
        training.optimizer.zero_grad()
        before = training.values()
        training.backward(x)
        found = {
            name: None if each.grad is None else bits(each.grad)
            for name, each in training.model.named_parameters()
        }
        training.optimizer.step()
    except PenstockError:
        return []
    except Exception as error:  # noqa: BLE001
        return [f"unclear: {error!r}"[:300]]
    if isinstance(training, MicroBatched):  # other gradients than those of the whole batch
        return []
    expected = plain_gradients(before, x)
    return [
        f"wrong gradient of {name}"
        for name, each in expected.items()
        if found[name] is not None and not same_bits(found[name], each)
    ]


def references(kind, path, warm):
    """Values before and after the step, and the points of the step."""
    with KINDS[kind](path) as training:
        for x in training.data[:warm]:
            training.step(x)
        before = training.values()
        with Interrupt() as counting:
            training.step(training.data[warm])
        after = training.values()
    return before, after, counting.points


def lost_values(training, expected):
    """Weights that have an element which is neither as before the step nor as after it."""
    wrong = []
    for name, each in training.values().items():
        old, new = (one[name] for one in expected)
        if not bool(((each == old) | (each == new)).all()):
            wrong.append(f"{name} is neither as before nor as after")
    return wrong


def left_behind(path, threads, charged):
    """Files, threads and memory that are there some time after the session is closed."""
    deadline = time.monotonic() + 2

    def found():
        alive = {
            each for each in threading.enumerate() if not each.name.startswith("penstock-io")
        } - threads
        files = [str(each) for each in Path(path).rglob("*")]
        held = host_account().used_bytes - charged
        texts = [
            f"threads: {alive}",
            f"files: {files}",
            f"{held} bytes: {host_account().held_by()}",
        ]
        return [
            text for text, is_there in zip(texts, (alive, files, held), strict=True) if is_there
        ]

    while (there := found()) and time.monotonic() < deadline:
        time.sleep(0.001)
    return there


def interrupted(kind, path, at, *, warm, error, goes_on, expected):
    """Interrupt a step; where, and what is wrong."""
    threads, charged = {*threading.enumerate()}, host_account().used_bytes
    wrong = []
    with ExitStack() as stack:
        stack.callback(faulthandler.cancel_dump_traceback_later)
        training = KINDS[kind](path)
        training.__enter__()
        for x in training.data[:warm]:
            training.step(x)
        interrupt = Interrupt(at, error)
        try:
            with interrupt:
                training.step(training.data[warm])
        except error:
            pass
        except BaseException as other:
            if interrupt.where is None:
                raise
            wrong.append(f"raised instead: {other!r}"[:300])
        if goes_on:
            wrong += trained_on(training)
        try:
            training.__exit__()
        except PenstockError as other:
            if not goes_on:
                wrong.append(f"on closing: {other!r}"[:300])
        except BaseException as other:  # noqa: BLE001
            wrong.append(f"on closing: {other!r}"[:300])
        if not goes_on:
            wrong += lost_values(training, expected)
        del training
        gc.collect()
    return interrupt.where, wrong + left_behind(path, threads, charged)


def main(kind, path, *given):
    """Interrupt points of a kind's step.

    Given are the steps before it, the first point, the stride to the next, ``on`` or ``off`` (whether to
    train on afterwards), ``exception`` or ``interrupt``, and the most points.
    """
    torch.set_num_threads(1)
    warm, begin, stride, goes_on, name, limit = given
    warm, begin, stride, goes_on, limit = (*map(int, given[:3]), goes_on == "on", int(limit))
    error = {"exception": HandlerError, "interrupt": KeyboardInterrupt}[name]
    before, after, points = references(kind, path, warm)
    print(json.dumps({"points": points}), flush=True)
    how = {"warm": warm, "error": error, "goes_on": goes_on, "expected": (before, after)}
    gc.freeze()  # so that collections, and the session that looks for modules, are quick
    interrupted(kind, path, points + 10**9, **how)  # nothing
    files = len(opened_files())
    for at in range(begin, min(points, begin + limit * stride), stride):
        print(json.dumps({"at": at}), flush=True)
        faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
        where, wrong = interrupted(kind, path, at, **how)
        if len(opened_files()) > files + 2:  # those of the session before may still be closing
            wrong.append(f"open files: {opened_files()}")
        print(json.dumps({"at": at, "where": where, "wrong": wrong}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
