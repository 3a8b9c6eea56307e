"""How ours are saved, for ``integrity.py``, in each way that a user has."""

import torch
from _integrity_peers import Dcp

from penstock import checkpoint
from penstock.checkpoint import Checkpointer
from penstock.checkpoint.dcp import DcpReader, DcpWriter

FROZEN = 5
"""Weights that a way which shares what did not change finds the same in both states."""


class Ours:
    codec = None

    def save(self, state, path):
        saved = checkpoint.save(path, state, codec=self.codec)
        whole = sum(each.nbytes for each in state.values())
        assert (saved.nbytes < whole) == (self.codec is not None)

    def load(self, path, state):
        return checkpoint.load(path)


class OursEncoded(Ours):
    codec = "zero-value+exponent"


class OursRetired:
    """A directory that keeps one checkpoint, and has the files of the one before that for the next."""

    wait, incremental = True, False
    checkpoints = None

    def save(self, state, path):
        for _ in range(3 if self.checkpoints is None else 1):
            if self.checkpoints is None:
                self.open(path)
            self.one(self.parts(state))
        assert self.checkpoints.stats.reused_bytes or self.incremental

    def open(self, path):
        self.checkpoints = Checkpointer(path, keep=1, incremental=self.incremental)
        latest = self.checkpoints.latest()
        self.step = 0 if latest is None else latest.step

    def one(self, parts):
        self.step += 1
        self.checkpoints.save(self.step, parts, wait=self.wait)
        self.checkpoints.wait()

    def parts(self, state):
        return state

    def load(self, path, state):
        self.close()
        self.open(path)
        found = self.checkpoints.load()
        self.close()
        if found is None:
            raise FileNotFoundError("no checkpoint")
        return self.whole(found)

    def whole(self, found):
        return found

    def close(self):
        if self.checkpoints is not None:
            self.checkpoints.close()
            self.checkpoints = None


class OursBackground(OursRetired):
    """The tensors are parameters that an optimizer changes, as in training."""

    wait = False

    def parts(self, state):
        parameters = {name: each.detach().requires_grad_() for name, each in state.items()}
        self.optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
        return {"model": parameters, "optimizer": self.optimizer}

    def whole(self, found):
        return found["model"]


class OursIncremental(OursRetired):
    """Some weights are the same in all checkpoints, and their file is shared, if it is not too short."""

    incremental = True
    frozen = FROZEN

    def parts(self, state):
        names = [f"layer.{index}.weight" for index in range(self.frozen)]
        frozen = {name: state[name] for name in names}
        return {"frozen": frozen, "moving": {k: v for k, v in state.items() if k not in frozen}}

    def whole(self, found):
        return found["frozen"] | found["moving"]


class OursDcp(Dcp):
    def writer(self, path):
        return DcpWriter(path)

    def reader(self, path):
        return DcpReader(path)
