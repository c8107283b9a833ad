"""Which options of ``resilient train`` a command line gives, without carrying them out."""

from __future__ import annotations

from typing import Any


def given_to_train(words: tuple[str, ...]) -> dict[str, Any]:
    """Return the options of ``resilient train`` that these words give, with their values.

    What the parser does not know is left to the command itself, which ends by it.
    """
    from resilient_cli.app import load
    from resilient_cli.tree import COMMANDS

    context = load("train", COMMANDS["train"]).make_context(
        "train", list(words), resilient_parsing=True
    )
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {
        name: context.params[name]
        for name, source in sources
        if source is not None and source.name == "COMMANDLINE"
    }
