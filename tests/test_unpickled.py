"""Nothing in the packages unpickles, runs text as code, or runs the code of a model's directory."""

from __future__ import annotations

import ast

from source import modules, nodes

MODULES = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "yaml"}
#: As they are called; `.eval()` of a torch module is none of these.
CALLS = {"eval", "exec", "torch.load", "numpy.load", "np.load"}
ARGUMENTS = {"trust_remote_code", "allow_pickle"}


def test_nothing_in_the_package_unpickles_or_runs_text() -> None:
    found = []
    assert len(modules()) > 200
    for file in modules():
        for node in nodes(file):
            names: set[str] = set()
            if isinstance(node, ast.Import):
                names = {alias.name.partition(".")[0] for alias in node.names} & MODULES
            elif isinstance(node, ast.ImportFrom):
                names = {(node.module or "").partition(".")[0]} & MODULES
            elif isinstance(node, ast.Call):
                given = {key.arg or "" for key in node.keywords if ast.unparse(key.value) != "False"}
                names = {ast.unparse(node.func)} & CALLS | given & ARGUMENTS
            found += [f"{file}:{getattr(node, 'lineno', 0)}: {name}" for name in names]
    assert found == []
