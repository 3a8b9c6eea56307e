"""The optimizer of a DeepSpeed configuration, as a line of Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.cli.deepspeed_keys import AUTO, Counterpart

LONGEST_LINE: Final = 88
_PREFIX: Final = "optimizer.params."
_PARAMETERS: Final = "model.parameters()"
_ADAM: Final = ("lr", "betas", "eps", "weight_decay", "amsgrad")
_ARGUMENTS: Final = {
    "Adam": _ADAM,
    "AdamW": _ADAM,
    "Lion": ("lr", "betas", "weight_decay"),
    "SGD": ("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    "Adagrad": ("lr", "lr_decay", "weight_decay", "eps"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
    "NAdam": ("lr", "betas", "eps", "weight_decay", "momentum_decay"),
    "RAdam": ("lr", "betas", "eps", "weight_decay"),
    "Adamax": ("lr", "betas", "eps", "weight_decay"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay"),
}
"""Element-wise optimizers and the arguments that a configuration may give them."""
_BY_NAME: Final = frozenset({"Adam", "AdamW", "Lion", "SGD", "Adagrad", "RMSprop"})
"""Those of which ``penstock.optim`` has a class ``Flash...``."""
_DEFAULTS: Final = {"AdamW": {"weight_decay": 0.0}, "Lion": {"lr": 1e-3}}
"""Defaults of DeepSpeed's classes that are not those of torch's or Penstock's."""
_OF_ARGS: Final = {
    "lr": "args.learning_rate",
    "betas": "(args.adam_beta1, args.adam_beta2)",
    "eps": "args.adam_epsilon",
    "weight_decay": "args.weight_decay",
}
"""Meaning of ``auto`` as arguments of Hugging Face's trainer."""
_HANDLED: Final = {
    "torch_adam": (Counterpart.UNSET, "the update is torch's own code in any case"),
    "adam_w_mode": (Counterpart.OPTIMIZER, "the class: AdamW, or Adam for false"),
    "bias_correction": (Counterpart.UNSET, "torch's Adam always corrects the bias"),
    "set_grad_none": (Counterpart.SCRIPT, "optimizer.zero_grad() does that"),
    "fp32_optimizer_states": (
        Counterpart.UNSET,
        "states are float32; format='bf16' has shorter ones",
    ),
}
_MASTERS: Final = {
    "bf16.bf16_master_weights_and_grads",
    "bfloat16.bf16_master_weights_and_grads",
    "fp16.fp16_master_weights_and_grads",
}
_SHORT: Final = {"bf16.bf16_optimizer_states", "bfloat16.bf16_optimizer_states"}


class OptimizerCall:
    """The line that makes the optimizer, and the rows of the keys that it is made of.

    Attributes:
        imports: Imports that the line needs.
        line: The line; empty if the script, or the trainer, makes the optimizer.
        name: Expression of the optimizer in other lines.
        shown: Name of the class or function, for rows.
        flash: Directory of the states; None if they stay in memory.
        why_not: Why they stay in memory though the configuration offloads them.
        adoptable: True if ``penstock run`` can put the script's own optimizer on flash.
        rows: Counterpart and text of each key that concerns the optimizer alone.
        notes: What else is to be known.
    """

    def __init__(
        self,
        entries: Mapping[str, Any],
        *,
        flash: str | None,
        clip_norm: float | None,
        half: bool,
        by_trainer: bool,
    ) -> None:
        """Find the class and its arguments.

        Args:
            entries: All keys of the configuration and their values.
            flash: Directory for the states; None if they are to stay in memory.
            clip_norm: Norm to which gradients are clipped; None if the script or the trainer clips.
            half: True if weights have 16 bits.
            by_trainer: True if Hugging Face's trainer trains.
        """
        self._entries = entries
        self._half = half
        self._by_trainer = by_trainer
        self.rows: dict[str, tuple[Counterpart, str]] = {}
        self.notes: list[str] = []
        self.imports: list[str] = []
        self.line = ""
        self.name = "optimizer"
        self.why_not = ""
        given = entries.get("optimizer.type")
        params = {
            key.removeprefix(_PREFIX): value
            for key, value in entries.items()
            if key.startswith(_PREFIX)
        }
        found = self._class(given, params)
        self.flash = flash if not given or found else None
        states = {} if self.flash is None else {"flash": self.flash} | self._states(clip_norm)
        arguments = self._arguments(found, given, params)
        self._name(found, given, arguments, states)
        self.adoptable = self.flash is not None and found != "Lion"
        self._say_type(found, given)
        self._say_precision()

    def _class(self, given: str | None, params: Mapping[str, Any]) -> str | None:
        """Return the name of an element-wise class, or None."""
        if given is None:
            return "AdamW" if self._by_trainer else None
        found = next((name for name in _ARGUMENTS if name.lower() == given.lower()), None)
        if found == "Adam" and params.get("adam_w_mode", True):
            return "AdamW"  # as DeepSpeed has it
        return found

    def _states(self, clip_norm: float | None) -> dict[str, Any]:
        found: dict[str, Any] = {} if clip_norm is None else {"clip_norm": clip_norm}
        if self._is_set(_SHORT):
            found["format"] = "bf16"
        elif self._is_set(_MASTERS):
            found["master"] = False
        return found

    def _is_set(self, keys: set[str]) -> bool:
        return any(self._entries.get(key) is True for key in keys)

    def _arguments(
        self, found: str | None, given: str | None, params: Mapping[str, Any]
    ) -> dict[str, str]:
        """Return the arguments of the class as source text, and note the row of each parameter."""
        made: dict[str, str] = {}
        for name, value in params.items():
            key = f"{_PREFIX}{name}"
            if found is not None and name in _ARGUMENTS[found]:
                if value == AUTO and name not in _OF_ARGS:
                    self.rows[key] = (
                        Counterpart.SCRIPT,
                        "the default; a trainer has no such value",
                    )
                    continue
                made[name] = _OF_ARGS[name] if value == AUTO else _source(value)
                self.rows[key] = Counterpart.OPTIMIZER, f"{name}={made[name]}"
            elif found is not None and name in _HANDLED:
                self.rows[key] = _HANDLED[name]
                if name == "bias_correction" and value is False:
                    self.rows[key] = Counterpart.NONE, "torch's Adam always corrects the bias"
            elif found is not None:
                self.rows[key] = Counterpart.UNKNOWN, f"{found} has no such argument"
            else:
                self.rows[key] = (
                    Counterpart.NONE,
                    f"an argument of {given or 'none'}",
                )
        if given is None and self._by_trainer:
            return dict(_OF_ARGS)
        if not params.get("torch_adam"):
            for name, value in _DEFAULTS.get(found or "", {}).items():
                made.setdefault(name, _source(value))
        return made

    def _name(
        self,
        found: str | None,
        given: str | None,
        arguments: dict[str, str],
        states: dict[str, Any],
    ) -> None:
        """Choose class and imports, and write the line."""
        told = [f"{name}={value!r}" for name, value in states.items()]
        words = [f"{name}={value}" for name, value in arguments.items()]
        self.shown = "on_flash" if found not in _BY_NAME else f"Flash{found}"
        if found is None or (given is None and self.flash is None):
            if self.flash is not None:  # the script's own optimizer
                if self._half and "master" not in states:
                    told.append("master=True")
                self.imports = ["from penstock.optim import on_flash"]
                self.line = call("optimizer = on_flash", ["optimizer", *told])
            return
        if self.flash is None:
            module = "penstock.optim" if found == "Lion" else "torch.optim"
            self.imports = [f"from {module} import {found}"]
            self.line = call(f"optimizer = {found}", [_PARAMETERS, *words])
        elif found in _BY_NAME:
            self.imports = [f"from penstock.optim import {self.shown}"]
            self.line = call(f"optimizer = {self.shown}", [_PARAMETERS, *words, *told])
        else:
            self.imports = [
                f"from torch.optim import {found}",
                "from penstock.optim import on_flash",
            ]
            if self._half and "master" not in states:
                told.append("master=True")
            made = f"{found}({', '.join([_PARAMETERS, *words])})"
            self.line = call("optimizer = on_flash", [made, *told])

    def _say_type(self, found: str | None, given: str | None) -> None:
        if given is None:
            if self.line and self._by_trainer:
                self.notes.append(
                    "All parameters get args.weight_decay; the Trainer's own optimizer leaves out biases"
                    " and norms. Make groups of parameters if you want that."
                )
            return
        key = "optimizer.type"
        if found is None:
            self.why_not = (
                f"{given} is not element-wise, or not in torch; its states stay in memory"
            )
            self.rows[key] = Counterpart.NONE, f"the script makes it. {self.why_not}"
            return
        where = "penstock.optim" if self.flash and found in _BY_NAME else "torch.optim"
        self.rows[key] = Counterpart.OPTIMIZER, f"{self.shown if self.flash else found} of {where}"
        if found == "AdamW" and given.lower() == "adam":
            where, text = self.rows[key]
            self.rows[key] = where, f"{text}: DeepSpeed's Adam decays weights as AdamW does"

    def _say_precision(self) -> None:
        for key in _MASTERS | _SHORT:
            if key not in self._entries:
                continue
            if self._entries[key] is not True:
                self.rows[key] = Counterpart.UNSET, "off"
            elif self.flash is None:
                self.rows[key] = (
                    Counterpart.SCRIPT,
                    "weights in 16 bits have such states",
                )
            elif key in _SHORT:
                self.rows[key] = (
                    Counterpart.OPTIMIZER,
                    (
                        "format='bf16': rounded at random, and 16 bits beside the weight make a master"
                    ),
                )
            else:
                text = (
                    "16 bits beside the weight make one" if self._is_set(_SHORT) else "master=False"
                )
                self.rows[key] = Counterpart.OPTIMIZER, text


def _source(value: Any) -> str:
    return repr(tuple(value)) if isinstance(value, list) else repr(value)


def call(head: str, words: Sequence[str], tail: str = "") -> str:
    """Return a call in Python, each argument on a line of its own if one line is too long."""
    line = f"{head}({', '.join(words)}){tail}"
    if len(line) <= LONGEST_LINE:
        return line
    return "\n".join([f"{head}(", *(f"    {word}," for word in words), f"){tail}"])
