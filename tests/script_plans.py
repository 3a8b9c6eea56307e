"""What ``penstock plan --script`` says of a recorded step: its options, its text and its document."""

import io
import json

from penstock.cli import plan
from penstock.cli.plan_budgets import print_budgets


def options_of(*words):
    return plan.parser().parse_args([*words, "--script", "train.py"])


def answered(step, *words):
    """The text and the document."""
    answers = []
    for more in ((), ("--json",)):
        file = io.StringIO()
        assert print_budgets(options_of(*words, *more), step, "train.py", file) == 0
        answers.append(file.getvalue())
    return answers[0], json.loads(answers[1])
