"""What ``penstock plan --script`` says of a recorded step: its options, its text and its document."""

import io
import json
from unittest import mock

from penstock.cli import plan, plan_budgets
from penstock.cli.plan_budgets import print_budgets


def options_of(*words):
    return plan.parser().parse_args([*words, "--script", "train.py"])


def answered(step, *words):
    """The text and the document, of plans that are made once: they are the same, and take seconds."""
    request = plan_budgets.requested(options_of(*words), step, "train.py")
    answers = []
    for more in ((), ("--json",)):
        file = io.StringIO()
        with mock.patch.object(plan_budgets, "requested", return_value=request):
            assert print_budgets(options_of(*words, *more), step, "train.py", file) == 0
        answers.append(file.getvalue())
    return answers[0], json.loads(answers[1])
