"""Whoever opens a file of the trainer sees a function on a screen, docstring included."""

import ast
from pathlib import Path

import resilient.train

LIMITS = {ast.FunctionDef: 60, ast.AsyncFunctionDef: 60}


def test_the_trainer_holds_nothing_long():
    long = [
        f"{path.name} {node.name}"
        for path in Path(resilient.train.__path__[0]).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if type(node) in LIMITS and node.end_lineno - node.lineno + 1 > LIMITS[type(node)]
    ]
    assert not long
