"""``penstock plan --from-deepspeed``: the counterparts of the keys of a DeepSpeed configuration."""

from __future__ import annotations

import argparse
import json
import re
import shlex
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.text import Text

from penstock import __version__
from penstock.cli.deepspeed_file import entries, read
from penstock.cli.deepspeed_keys import AUTO, KEYS, Counterpart
from penstock.cli.deepspeed_optimizer import OptimizerCall, call
from penstock.cli.output import print_result
from penstock.core.errors import ConfigError
from penstock.core.files import absolute_path
from penstock.observe.summary_text import text_table

NO_DIRECTORY: Final = "/nvme/spill"
"""Directory in the code if the configuration names none."""
LIVE_PARAMETERS: Final = 10**9
"""DeepSpeed's default of ``stage3_max_live_parameters``."""
COMMAND_COLUMNS: Final = 56
VALUE_COLUMNS: Final = 24
LONG_NUMBER: Final = 1e5
"""Number from which whole numbers that are written as floats are shown with an exponent."""
_OPTION: Final = re.compile(r"(--[a-z-]+) (?!-)")
"""An option before its value, from which no line break may part it."""
_LIVE: Final = (
    "zero_optimization.stage3_max_live_parameters",
    "zero_optimization.max_live_parameters",
)
_TRAINER_NAMES: Final = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "bf16.enabled": "bf16",
    "bfloat16.enabled": "bf16",
    "fp16.enabled": "fp16",
}


@dataclass(frozen=True)
class MappedKey:
    """A key of the configuration, and what stands in its place."""

    key: str
    value: Any
    counterpart: Counterpart
    text: str


@dataclass(frozen=True)
class Translation:
    """A DeepSpeed configuration in terms of Penstock and torch."""

    source: str
    keys: tuple[MappedKey, ...]
    code: str
    """Python for a script that has ``model`` and ``train``, or ``args`` and ``dataset`` of a trainer."""
    command: str
    """Command for a script that is not changed otherwise."""
    command_on_ranks: str | None
    """The same with a rank on each GPU; None if that is not possible, or was not asked for."""
    notes: tuple[str, ...]


def execute(options: argparse.Namespace) -> int:
    """Print the translation of the file that ``--from-deepspeed`` names.

    Raises:
        ConfigError: The file cannot be read, is not JSON, or a value has the wrong type.
    """
    found = translate(options.from_deepspeed)
    print_result(options.json, lambda: document(found), lambda: text(found))
    return 0


def translate(file: str) -> Translation:
    """Find what stands in place of each key of a file. Raises ConfigError as ``execute``."""
    source = absolute_path(file, "--from-deepspeed")
    return _Reader(source, dict(entries(read(source), source))).translation()


def _has_auto(value: Any) -> bool:
    """Return whether a value is ``auto``, or has one in it."""
    if isinstance(value, dict | list):
        return any(map(_has_auto, value.values() if isinstance(value, dict) else value))
    return bool(value == AUTO)


class _Reader:
    """Finds what stands in place of each key, which for some depends on others."""

    def __init__(self, source: str, entries: dict[str, Any]) -> None:
        self.source = source
        self.entries = entries
        self.by_trainer = any(map(_has_auto, entries.values()))
        self.stage = self._get("zero_optimization.stage", 0)
        self.half = any(
            self._get(f"{name}.enabled", False) is True for name in ("bf16", "bfloat16", "fp16")
        )
        self.states = self._offloaded("optimizer", "cpu_offload") if self.stage else None
        self.weights = self._offloaded("param", "cpu_offload_param") if self.stage == 3 else None
        named = self.named = [
            self._path(part)
            for part, device in (("param", self.weights), ("optimizer", self.states))
            if device == "nvme"
        ]
        self.directory = named[0] if named else NO_DIRECTORY
        self.recomputes = any(
            self._get(f"activation_checkpointing.{name}", False) is True
            for name in ("partition_activations", "cpu_checkpointing")
        )
        self.optimizer = OptimizerCall(
            entries,
            flash=None if self.states is None else named[-1] if named else NO_DIRECTORY,
            clip_norm=self._clip_norm(),
            half=self.half,
            by_trainer=self.by_trainer,
        )

    def _get(self, key: str, default: Any) -> Any:
        value = self.entries.get(key)
        return default if value is None or value == AUTO else value

    def _offloaded(self, part: str, older: str) -> str | None:
        device = self._get(f"zero_optimization.offload_{part}.device", "none")
        if device == "none" and self._get(f"zero_optimization.{older}", False):
            device = "cpu"
        return None if device == "none" else str(device)

    def _path(self, part: str) -> str:
        key = f"zero_optimization.offload_{part}.nvme_path"
        path = self._get(key, "")
        if not path:
            raise ConfigError(
                f"{self.source}: {key} is missing, and offload_{part}.device is 'nvme'; name a directory"
            )
        return str(path)

    def _clip_norm(self) -> float | None:
        value = self._get("gradient_clipping", 0)
        return float(value) if value and not self.by_trainer else None

    @property
    def weights_memory(self) -> str:
        """Limit of weights in memory, from the number of parameters that may be live."""
        live = max(self._get(key, 0) for key in _LIVE) or LIVE_PARAMETERS
        nbytes = int(live) * (2 if self.half else 4)
        for unit, scale in (("GB", 10**9), ("MB", 10**6)):
            if nbytes % scale == 0:
                return f"{nbytes // scale}{unit}"
        return f"{nbytes}B"

    def translation(self) -> Translation:
        """Return everything that is printed."""
        keys = tuple(
            MappedKey(key, each, *self._found(key, each)) for key, each in self.entries.items()
        )
        settings = {"memory": "auto", "flash": self.directory}
        words = ["penstock", "run", "--memory", "auto", "--flash", self.directory]
        if self.weights == "nvme":
            settings |= {"weights": "flash", "weights_memory": self.weights_memory}
            words += ["--weights", "flash", "--weights-memory", self.weights_memory]
        if self.optimizer.adoptable:
            words += ["--optimizer-state", "flash"]
        given = [f"{name}={value!r}" for name, value in settings.items()]
        if self.recomputes:
            given.append("recompute=True")
            words.append("--recompute")
        command = shlex.join([*words, "train.py"])
        launched = f"torchrun --nproc-per-node gpu --no-python {command}"
        return Translation(
            source=self.source,
            keys=keys,
            code=self._code(given),
            command=command,
            command_on_ranks=launched if self.stage and self.weights != "nvme" else None,
            notes=(*self._notes(), *_unknown(keys)),
        )

    def _code(self, settings: Sequence[str]) -> str:
        optimizer = self.optimizer
        made = [optimizer.line] if optimizer.line else []
        if self.by_trainer:
            words = ["model", "args", "train_dataset=dataset", "callbacks=[offloading]"]
            if made:
                words.append("optimizers=(optimizer, None)")
            lines = [
                "from transformers import Trainer",
                *optimizer.imports,
                "from penstock.hosts.transformers import TrainerOffload",
                "",
                *made,
                call("offloading = TrainerOffload", settings),
                call("trainer = Trainer", words),
                "trainer.train()",
            ]
        else:
            words = ["model", "optimizer", *settings]
            lines = [
                "import penstock",
                *optimizer.imports,
                "",
                *made,
                call("with penstock.offload", words, " as session:"),
                "    train(model, optimizer)",
            ]
        return "\n".join(lines) + "\n"

    def _notes(self) -> Iterator[str]:
        if self.by_trainer:
            yield (
                'Values that are "auto" come from TrainingArguments, here args: the code is for Hugging'
                " Face's Trainer. Leave deepspeed= out of TrainingArguments."
            )
        else:
            yield (
                "deepspeed.initialize goes: engine.backward(loss) is loss.backward(), and engine.step()"
                " is optimizer.step() and optimizer.zero_grad(). train stands for the loop."
            )
        if self.directory == NO_DIRECTORY:
            yield (
                f"No directory on NVMe is named: {NO_DIRECTORY} stands for yours. Saved tensors go there"
                f" if memory is short{', states in any case' * (self.optimizer.flash is not None)}."
            )
        if self.weights == "nvme":
            yield (
                "On GPUs weights on flash are for one process; over ranks they have been tested on CPUs"
                " only. weights_memory must hold the two largest weights."
            )
        if len(set(self.named)) > 1:
            yield (
                f"The command has all in {self.named[0]}: with --flash {shlex.quote(self.named[1])} as"
                " well, everything is spread over both."
            )
        yield from self.optimizer.notes

    def _found(self, key: str, value: Any) -> tuple[Counterpart, str]:
        """Return where the counterpart of a key is, and its text."""
        if key in self.optimizer.rows:
            return self.optimizer.rows[key]
        known = KEYS.get(key)
        named = key.removeprefix("zero_optimization.").removeprefix("stage3_").replace(".", "_")
        if known is None:
            found = Counterpart.UNKNOWN, "no key of DeepSpeed's that this version of Penstock knows"
        elif value is None or value == {}:
            found = Counterpart.UNSET, "not set"
        elif self.by_trainer and key in _TRAINER_NAMES:
            found = Counterpart.SCRIPT, f"{_TRAINER_NAMES[key]} of TrainingArguments"
        elif known.text:
            found = known.counterpart, known.text
        elif value == AUTO and key not in _LIVE:
            found = Counterpart.SCRIPT, "the trainer's own argument, if it has one"
        else:
            found = getattr(self, f"_of_{named}")(value)
        return found

    def _of_stage(self, stage: Any) -> tuple[Counterpart, str]:
        if self.weights == "nvme":
            return (
                Counterpart.RANKS,
                "one process, all on flash: there is nothing to divide",
            )
        return Counterpart.RANKS, {
            0: "several GPUs: DistributedDataParallel",
            1: "several GPUs: as stage 2, which FSDP2 has in its place",
            2: "several GPUs: fully_shard(block, reshard_after_forward=False)",
            3: "several GPUs: fully_shard(block) for each block, then fully_shard(model)",
        }.get(stage, "several GPUs: FSDP2, by fully_shard")

    def _of_offload_optimizer_device(self, device: str) -> tuple[Counterpart, str]:
        if device == "none":
            return Counterpart.UNSET, "states stay where the weights are"
        if self.states is None:
            return Counterpart.NONE, "DeepSpeed offloads states at stages 1 to 3 only; they stay"
        if self.optimizer.flash is None:
            return Counterpart.NONE, self.optimizer.why_not
        there = "" if device == "nvme" else "; host_memory=SIZE keeps some in memory"
        return Counterpart.OPTIMIZER, f"{self.optimizer.shown}: states on flash{there}"

    def _of_offload_optimizer_nvme_path(self, path: str) -> tuple[Counterpart, str]:
        if self.states != "nvme" or self.optimizer.flash is None:
            return Counterpart.NONE, "not used: no states go to NVMe"
        return Counterpart.OPTIMIZER, f"flash={path!r}"

    def _of_offload_param_device(self, device: str) -> tuple[Counterpart, str]:
        if device == "none":
            return Counterpart.UNSET, "weights stay on the device"
        if self.weights is None:
            return Counterpart.NONE, "DeepSpeed offloads weights at stage 3 only; they stay"
        if device == "cpu":
            return Counterpart.RANKS, (
                "offload_policy=CPUOffloadPolicy() of fully_shard, which keeps them in host memory;"
                " Penstock has weights there by weights='host' on one GPU, or on flash by weights='flash'"
            )
        return Counterpart.SESSION, "weights='flash'"

    def _of_offload_param_nvme_path(self, path: str) -> tuple[Counterpart, str]:
        if self.weights != "nvme":
            return Counterpart.NONE, "not used: no weights go to NVMe"
        return Counterpart.SESSION, f"flash={path!r}"

    def _of_offload_param_max_in_cpu(self, count: float) -> tuple[Counterpart, str]:
        return Counterpart.NONE, (
            "weights are on flash or in use: weights_memory= limits the latter, on a GPU in its memory"
        )

    def _of_max_live_parameters(self, count: float) -> tuple[Counterpart, str]:
        if self.weights != "nvme":
            return Counterpart.UNSET, "FSDP2 frees each block after its use"
        return Counterpart.SESSION, f"weights_memory={self.weights_memory!r}"

    def _of_cpu_offload(self, given: bool) -> tuple[Counterpart, str]:
        return self._of_offload_optimizer_device("cpu" if given else "none")

    def _of_cpu_offload_param(self, given: bool) -> tuple[Counterpart, str]:
        return self._of_offload_param_device("cpu" if given else "none")

    def _of_gradient_accumulation_steps(self, count: float) -> tuple[Counterpart, str]:
        if count == 1:
            return Counterpart.UNSET, "optimizer.step() after each backward"
        if self.weights == "nvme":
            text = "penstock.micro_batched(..., parts={0}) reads each weight once for all {0}"
        else:
            text = "optimizer.step() after {0} backwards, each of loss / {0}"
        return Counterpart.SCRIPT, text.format(int(count))

    def _of_gradient_clipping(self, norm: float) -> tuple[Counterpart, str]:
        if not norm:
            return Counterpart.UNSET, "no clipping"
        if self.optimizer.flash is not None:
            return Counterpart.OPTIMIZER, f"clip_norm={float(norm)!r}"
        return Counterpart.SCRIPT, f"torch.nn.utils.clip_grad_norm_(model.parameters(), {norm})"

    def _of_activation_checkpointing_partition_activations(
        self, given: bool
    ) -> tuple[Counterpart, str]:
        if not given:
            return Counterpart.UNSET, "off"
        return Counterpart.SESSION, (
            "recompute=True, or torch.utils.checkpoint in the model; what is saved is not divided"
            " among ranks, but offloaded by each"
        )

    def _of_activation_checkpointing_cpu_checkpointing(
        self, given: bool
    ) -> tuple[Counterpart, str]:
        if not given:
            return Counterpart.UNSET, "off"
        return Counterpart.SESSION, (
            "the session itself: saved tensors go to host memory and flash, as many as have to"
        )

    def _of_bf16_enabled(self, given: bool) -> tuple[Counterpart, str]:
        if not given:
            return Counterpart.UNSET, "off"
        master = "; the optimizer keeps a float32 master" if self.optimizer.flash else ""
        return Counterpart.SCRIPT, f"model.to(torch.bfloat16){master}"

    _of_bfloat16_enabled = _of_bf16_enabled


def _unknown(keys: Sequence[MappedKey]) -> Iterator[str]:
    """Yield a note on the keys that are not known, if there are any."""
    if unknown := [each.key for each in keys if each.counterpart is Counterpart.UNKNOWN]:
        yield f"Not known, so not translated: {', '.join(unknown)}."


def document(found: Translation) -> dict[str, Any]:
    """Return the JSON document."""
    return {"schema": 1, "penstock": __version__, **asdict(found)}


def text(found: Translation) -> RenderableType:
    """Render the translation for the terminal."""
    parts = [_verbatim(found.source, style="bold"), Text(), _table(found), Text()]
    parts += [Text("In the script", style="bold"), Text(), _verbatim(found.code)]
    parts += [Text("Or for a script that makes its own optimizer and loop", style="bold"), Text()]
    for command in (found.command, found.command_on_ranks):
        if command is not None:
            wrapped = textwrap.wrap(
                _OPTION.sub(r"\1\0", command),
                COMMAND_COLUMNS,
                subsequent_indent="    ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            parts.append(_verbatim("$ " + " \\\n".join(wrapped).replace("\0", " ")))
    for note in found.notes:
        parts += [Text(), Text(note)]
    return Group(*parts)


def _verbatim(text: str, style: str = "") -> Text:
    """Return text whose lines are not wrapped, however long their paths are."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")


def _table(found: Translation) -> RenderableType:
    """Return the keys as a table, indented below their sections."""
    rows: list[tuple[str, str, str]] = []
    above: list[str] = []
    for each in found.keys:
        sections, _, name = each.key.rpartition(".") if '"' not in each.key else ("", "", each.key)
        inside = sections.split(".") if sections else []
        for depth, section in enumerate(inside):
            if above[: depth + 1] != inside[: depth + 1]:
                rows.append((f"{'  ' * depth}{section}", "", ""))
                above = inside[: depth + 1]
        above = inside
        rows.append((f"{'  ' * len(inside)}{name}", _shown(each.value), _instead(each)))
    return text_table(("DeepSpeed", "value", "with Penstock"), rows)


def _instead(each: MappedKey) -> str:
    if each.counterpart is Counterpart.NONE:
        return f"nothing: {each.text}"
    return f"unknown: {each.text}" if each.counterpart is Counterpart.UNKNOWN else each.text


def _shown(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and value >= LONG_NUMBER:
        return f"{value:g}"
    written = json.dumps(value)
    return written if len(written) <= VALUE_COLUMNS else f"{written[: VALUE_COLUMNS - 3]}..."
